// The recurrent kernels for one instruction set; setup.py gives this file its flags by its name.
#include "causal_conv.h"
#include "elementwise.h"
#include "selective_scan.h"

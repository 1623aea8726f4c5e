// The recurrent kernels for one instruction set; setup.py gives this file its flags by its name.
#if defined(__AVX2__)
#include "causal_conv.h"
#include "elementwise.h"
#include "selective_scan.h"
#endif

// The recurrent kernels for one instruction set; setup.py gives this file its flags by its name.
#if defined(__AVX512F__)
#include "causal_conv.h"
#include "elementwise.h"
#include "selective_scan.h"
#endif

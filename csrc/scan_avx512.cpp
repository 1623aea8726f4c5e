#if defined(__x86_64__)
#include "causal_conv.h"
#include "elementwise.h"
#include "selective_scan.h"
#endif

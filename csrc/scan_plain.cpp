#include "causal_conv.h"
#include "elementwise.h"
#include "selective_scan.h"

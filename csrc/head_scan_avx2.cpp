#if defined(__x86_64__)
#include "head_scan_unit.h"
#endif

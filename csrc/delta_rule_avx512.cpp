#if defined(__x86_64__)
#include "delta_rule_unit.h"
#endif

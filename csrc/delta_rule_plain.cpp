#include "delta_rule_unit.h"

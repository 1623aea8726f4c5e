#include "head_scan_unit.h"

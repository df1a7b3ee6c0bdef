// Any processor: what the compiler makes of C++.
#pragma once

#include "group.h"

constexpr int PANELS_AT_ONCE = 1, GROUPS_AT_ONCE = 1;

INLINE void multiply_add(i32_register& c, const int8_t* a, u32_register b) {
    for (int i = 0; i < 4; i++) c += bit_cast<i32_register>((b >> (8 * i)) & 0xff) * int32_t(a[i]);
}

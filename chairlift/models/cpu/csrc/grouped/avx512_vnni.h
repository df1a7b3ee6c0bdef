// AVX-512 with VNNI: four groups and two panels at once are eight chains of sums, which hides their latency.
#pragma once

#include "group.h"

constexpr int PANELS_AT_ONCE = 2, GROUPS_AT_ONCE = 4;

INLINE void multiply_add(i32_register& c, const int8_t* a, u32_register b) {
    const __m512i word = _mm512_set1_epi32(load<int32_t>(a));
    c = bit_cast<i32_register>(_mm512_dpbusd_epi32(bit_cast<__m512i>(c), bit_cast<__m512i>(b), word));
}

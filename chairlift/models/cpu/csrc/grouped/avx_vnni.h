// AVX2 with AVX-VNNI.
#pragma once

#include "group.h"

constexpr int PANELS_AT_ONCE = 1, GROUPS_AT_ONCE = 1;

INLINE void multiply_add(i32_register& c, const int8_t* a, u32_register b) {
    const __m256i word = _mm256_set1_epi32(load<int32_t>(a));
    c = bit_cast<i32_register>(_mm256_dpbusd_avx_epi32(bit_cast<__m256i>(c), bit_cast<__m256i>(b), word));
}

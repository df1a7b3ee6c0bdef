// The products of a group with the columns of some panels: a room for each level. All give the same integers.
//
// A room says of how many panels and rows sums are kept in registers (PANELS_AT_ONCE, GROUPS_AT_ONCE), and has the
// level's instructions: `multiply_add` or `multiply_register`. Of these, signed_bytes.h or unsigned_bytes.h makes
// `multiply_group`. `arrange` brings the words of some columns into the order in which they are multiplied.
//
//     AMX                        amx.h, for many rows of a model in float32; for few, the next
//     AVX-512 with VNNI          avx512_vnni.h    unsigned
//     AVX2 with AVX-VNNI         avx_vnni.h       unsigned
//     AVX2, AVX-512 without      avx2.h           signed
//     NEON                       neon.h           signed
//     any processor              plain.h          unsigned
//
// With AMX, a model in bfloat16 multiplies none of these integers: see unpacked.h.
#pragma once

#if defined(__AVX512VNNI__)
#include "avx512_vnni.h"
#include "unsigned_bytes.h"
#elif defined(__AVXVNNI__)
#include "avx_vnni.h"
#include "unsigned_bytes.h"
#elif defined(__AVX2__)
#include "avx2.h"
#include "signed_bytes.h"
#elif defined(__aarch64__)
#include "neon.h"
#include "signed_bytes.h"
#else
#include "plain.h"
#include "unsigned_bytes.h"
#endif

// Weights in groups, multiplied as bfloat16 by the tiles of AMX: panels are unpacked in a thread's own cache.
//
// A sum of integers would have to leave its tile after every group to be scaled, which takes longer than the products. A
// weight that is scaled before it is rounded to bfloat16 needs nothing of that, and rows are multiplied as they are. All
// numbers of rows are multiplied so, since bits must not depend on them. With one row, unpacking takes a little longer
// than reading the weights.
//
// For several blocks of rows a unit's panels are unpacked with the first, and kept for the others.
#pragma once

#include <cstdlib>

#include "../checks.h"
#include "../product/product.h"
#include "panel.h"

// At a time. While some groups are unpacked, the tiles of those before are multiplied: products of one row are a chain.
constexpr int64_t UNPACKED_DEPTH = 128;

// Two vectors of neighbours along the depth as a line of a panel: for each column the first, then the second.
INLINE u32x16 as_line(f32x16 first, f32x16 second) {
#if defined(__AVX512BF16__)
    alignas(64) static constexpr uint16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512bh both = _mm512_cvtne2ps_pbh(bit_cast<__m512>(second), bit_cast<__m512>(first));
    return bit_cast<u32x16>(_mm512_permutexvar_epi16(load<__m512i>(ORDER), bit_cast<__m512i>(both)));
#else
    return round_to_bf16(first) | round_to_bf16(second) << 16;
#endif
}

// Sixteen bytes of weights, or halves of bytes, which are the `BITS` bits from `from` on of each word, times 256 scales.
// They become the upper bits of a number from 1 to 2, so that no conversion is needed; `offset` corrects for that.
template <int BITS> INLINE f32x16 unpack_bits(u32x16 words, int from, f32x16 scale, f32x16 offset) {
    const __m512i mask = _mm512_set1_epi32(((1 << BITS) - 1) << (23 - BITS)), one = _mm512_set1_epi32(0x3f800000);
    const int up = 23 - BITS - from;
    const u32x16 placed = up < 0 ? words >> -up : words << up;
    constexpr int A_AND_B_OR_C = 0xea;  // gcc would choose an order of operands that needs a copy of one of them
    const __m512i bits = _mm512_ternarylogic_epi32(bit_cast<__m512i>(placed), mask, one, A_AND_B_OR_C);
    return fma16(bit_cast<f32x16>(bits), scale, offset);
}

// The four neighbours of each column that a word has, as two lines.
template <int BITS> INLINE void unpack_word(u32x16 words, int from, f32x16 scale, f32x16 offset, bf16* to) {
    f32x16 weights[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) weights[i] = unpack_bits<BITS>(words, 8 * i + from, scale, offset);
    store_raw(to, as_line(weights[0], weights[1]));
    store_raw(to + 2 * LANES, as_line(weights[2], weights[3]));
}

// Unpacks `count` groups of a panel from one on: without the units.
template <class Format, bool HAS_OFFSETS>
static void unpack_groups(const Matrix& matrix, int64_t panel, int64_t group, int64_t count, bf16* to) {
    constexpr int64_t GROUP_BYTES = GROUP * LANES * Format::STORED_BITS / 8, WORD = 4 * LANES;
    constexpr float ONES = 256, ZERO_BYTE = ZERO_OF<Format, HAS_OFFSETS>;
    const int64_t panel_bytes = matrix.depth / GROUP * GROUP_BYTES;
    const char* from = static_cast<const char*>(matrix.panels) + panel * panel_bytes + group * GROUP_BYTES;
    ScaleReader<Format, HAS_OFFSETS, 1> reader(matrix, panel, group, 2);
    GroupScales<1, Format::SCALES> by;
    for (int64_t i = 0; i < count; i++, from += GROUP_BYTES) {
        reader.next(by);
        const auto scale = [&](int w) { return by.scales[0][w * Format::SCALES / GROUP_WORDS]; };
        const auto offset = [&](int w) {
            return by.offsets[0][w * Format::SCALES / GROUP_WORDS] + scale(w) * -(ONES + ZERO_BYTE);
        };
        if constexpr (Format::BITS == 4) {
#pragma GCC unroll 4
            for (int w = 0; w < GROUP_WORDS; w += 2, to += 2 * WORD) {
                const u32x16 halves = load<u32x16>(from + w * 32);
                __builtin_prefetch(from + w * 32 + 2 * panel_bytes, 0, 2);
                unpack_word<4>(halves, 0, scale(w) * ONES, offset(w), to);
                unpack_word<4>(halves, 4, scale(w) * ONES, offset(w), to + WORD);
            }
        } else {
            u32x16 words[GROUP_WORDS];
            load_words<Format>(from, 2 * panel_bytes, matrix.table, words);
#pragma GCC unroll 8
            for (int w = 0; w < GROUP_WORDS; w++, to += WORD)
                unpack_word<8>(words[w], 0, scale(w) * ONES, offset(w), to);
        }
    }
}

typedef void (*Unpack)(const Matrix&, int64_t panel, int64_t group, int64_t count, bf16* to);

INLINE Unpack unpack_of(const Matrix& matrix) {
    return with_format(matrix, [](auto format, auto has_offsets) -> Unpack {
        return unpack_groups<decltype(format), decltype(has_offsets)::value>;
    });
}

// Panels that this thread has unpacked, while it is in a parallel region.
struct UnpackedPanels {
    const void* of = nullptr;  // the matrix's panels
    int64_t panel = 0, size = 0;  // size: elements that there is memory for
    int count = 0;
    bf16* values = nullptr;

    bool holds(const Matrix& matrix, int64_t first, int panels) const {
        return of == matrix.panels && panel == first && count == panels;
    }

    // Memory for panels, which it is to hold from now on.
    bf16* hold(const Matrix& matrix, int64_t first, int panels) {
        const int64_t needed = panels * matrix.depth * LANES;
        if (needed > size) {
            forget();
            values = static_cast<bf16*>(aligned_alloc(64, size_t(needed) * sizeof(bf16)));
            CHECK(values);
            size = needed;
        }
        of = matrix.panels, panel = first, count = panels;
        return values;
    }

    void forget() {
        std::free(values);
        *this = {};
    }
};

inline thread_local UnpackedPanels unpacked_panels;

// Multiplies some groups of one or two panels that are unpacked.
template <bool TWO_ROW_TILES, bool TWO_PANELS>
INLINE void add_unpacked(const bf16* a, int64_t lda, const bf16* first, const bf16* second, int64_t depth) {
    const int64_t stride = lda * sizeof(bf16);
    for (int64_t k = 0; k < depth; k += GROUP) {
        _tile_loadd(6, first + k * LANES, 64);
        if (TWO_PANELS) _tile_loadd(7, second + k * LANES, 64);
        _tile_loadd(4, a + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_PANELS) _tile_dpbf16ps(1, 4, 7);
        if (TWO_ROW_TILES) {
            _tile_loadd(5, a + 16 * lda + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_PANELS) _tile_dpbf16ps(3, 5, 7);
        }
    }
}

// `multiply_tiles` of product/amx.h for one or two panels of weights in groups. `keep`: where the panels stay; or null.
template <bool TWO_ROW_TILES, bool TWO_PANELS>
static void multiply_unpacking(const bf16* a, int64_t lda, const Matrix& matrix, int64_t panel, float* c, int64_t ldc,
                               bf16* keep) {
    alignas(64) bf16 blocks[2][2][UNPACKED_DEPTH * LANES];
    const Unpack unpack = unpack_of(matrix);
    const int64_t c_stride = ldc * sizeof(float), depth = matrix.depth;
    const auto size = [&](int64_t k) { return depth - k < UNPACKED_DEPTH ? depth - k : UNPACKED_DEPTH; };
    const auto place = [&](int64_t k, int p) {
        return keep ? keep + (p * depth + k) * LANES : blocks[k / UNPACKED_DEPTH % 2][p];
    };
    _tile_zero(0);
    if (TWO_PANELS) _tile_zero(1);
    if (TWO_ROW_TILES) _tile_zero(2);
    if (TWO_ROW_TILES && TWO_PANELS) _tile_zero(3);
    for (int64_t k = 0; k < depth + UNPACKED_DEPTH; k += UNPACKED_DEPTH) {
        if (k < depth) {
            unpack(matrix, panel, k / GROUP, size(k) / GROUP, place(k, 0));
            if (TWO_PANELS) unpack(matrix, panel + 1, k / GROUP, size(k) / GROUP, place(k, 1));
        }
        finish_stores();
        const int64_t before = k - UNPACKED_DEPTH;
        if (before >= 0)
            add_unpacked<TWO_ROW_TILES, TWO_PANELS>(a + before, lda, place(before, 0), place(before, 1), size(before));
    }
    _tile_stored(0, c, c_stride);
    if (TWO_PANELS) _tile_stored(1, c + LANES, c_stride);
    if (TWO_ROW_TILES) _tile_stored(2, c + 16 * ldc, c_stride);
    if (TWO_ROW_TILES && TWO_PANELS) _tile_stored(3, c + 16 * ldc + LANES, c_stride);
}

// Multiplies up to 32 rows by `panels` panels, and then by the units. `is_kept`: other rows will be, too.
static void multiply_unpacked(const bf16* a, int64_t lda, int rows, const Matrix& matrix, int64_t panel, int panels,
                              float* c, int64_t ldc, bool is_kept) {
    if (unpacked_panels.holds(matrix, panel, panels)) {
        multiply(a, lda, rows, unpacked_panels.values, panels, matrix.depth, c, ldc);
    } else {
        bf16* const keep = is_kept ? unpacked_panels.hold(matrix, panel, panels) : nullptr;
        shape_tiles(rows < 16 ? rows : 16, rows > 16 ? rows - 16 : 16);
        for (int p = 0; p < panels; p += 2) {
            const bool is_pair = panels - p > 1;
            const auto part = rows > 16 ? (is_pair ? multiply_unpacking<true, true> : multiply_unpacking<true, false>)
                                        : (is_pair ? multiply_unpacking<false, true> : multiply_unpacking<false, false>);
            part(a, lda, matrix, panel + p, c + p * LANES, ldc, keep ? keep + p * matrix.depth * LANES : nullptr);
        }
    }
    finish_stores();
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < panels * LANES; k += LANES)
            store16(c + r * ldc + k, load16(c + r * ldc + k) * load16(matrix.units + panel * LANES + k));
}

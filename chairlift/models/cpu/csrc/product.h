// The product C = A B, which takes almost all of the time. B is stored in panels of 16 columns; within a panel, `Pack`
// consecutive elements of a column are adjacent, as the dot-product instructions of every x86 generation need them:
//
//     panel p:  [depth / Pack][16][Pack]      bf16: Pack 2    float: Pack 1
//
// Each element of C is one chain of additions over the depth, whatever the number of rows: results do not depend on
// what else is in the batch.
#pragma once

#include "vector.h"

#if defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

template <class T> constexpr int Pack = 4 / sizeof(T);

// B as weights. The fields after the depth are those of weights in groups: see grouped.h.
struct Matrix {
    const void* panels;
    const float* bias;  // [columns], or null
    int64_t columns;
    int64_t depth;  // with padding
    const void *scales, *offsets;
    const float* units;
    int64_t num_bits, group_size, scale_bits;  // more than 8 bits: the model's number format
    // The rounding errors of the columns from `first_residual` on, in groups as well; null: they are not kept.
    const void *residual_panels, *residual_scales, *residual_offsets;
    const float* residual_units;
    int64_t first_residual;  // the first of them, where a unit of panels begins

    Matrix residual() const {
        Matrix own = *this;
        own.panels = residual_panels, own.scales = residual_scales;
        own.offsets = residual_offsets, own.units = residual_units;
        return own;
    }
};

// How far ahead of use weights are prefetched: few rows only wait for memory, more rows must not wait at all.
constexpr int64_t PREFETCH_BYTES = 1024, FAR_PREFETCH_BYTES = 4096;

// What to prefetch while a product is computed. Only so many cache lines can be in flight, and further requests stall:
// so a few lines are requested at a time, between multiplications.
struct Fetch {
    bool is_first = false;       // B itself is not in the cache yet
    const char* next = nullptr;  // lines of what will be multiplied afterwards
    int lines_per_step = 0;
};

// ---- any machine: registers of ROWS x PANELS accumulators ----

constexpr int64_t MOST_DEPTH = 1024;  // at a time, so that rows of it stay in the first two levels of the cache

#if defined(__AVX512F__)
constexpr int MOST_ROWS = 12, MOST_PANELS = 2, FEW_ROWS = 4, FEW_ROWS_PANELS = 4;
#elif defined(__AVX2__)
constexpr int MOST_ROWS = 5, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 4;
#elif defined(__aarch64__)
constexpr int MOST_ROWS = 5, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#else
constexpr int MOST_ROWS = 2, MOST_PANELS = 1, FEW_ROWS = 1, FEW_ROWS_PANELS = 2;
#endif

// The factors in a vector of `Pack` neighbours of each column, part by part.
template <int PART> INLINE f32x16 part_of(f32x16 words) { return words; }
template <int PART> INLINE f32x16 part_of(u32x16 words) {  // two bfloat16
    return bit_cast<f32x16>(PART ? words & 0xffff0000u : words << 16);
}

template <class T> struct Factor { typedef u32x16 type; };
template <> struct Factor<float> { typedef f32x16 type; };

// Adds the products with the rows of A from `a` on, which have the row stride lda.
template <int PART, int PARTS, int ROWS, int PANELS, class Words>
INLINE void add_products(f32x16 (&sum)[ROWS][PANELS], const float* a, int64_t lda, const Words (&words)[PANELS]) {
    f32x16 factors[PANELS];
    for (int p = 0; p < PANELS; p++) factors[p] = part_of<PART>(words[p]);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const f32x16 element = splat(a[r * lda + PART]);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sum[r][p] = fma16(element, factors[p], sum[r][p]);
    }
    if constexpr (PART + 1 < PARTS) add_products<PART + 1, PARTS>(sum, a, lda, words);
}

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define CHAIRLIFT_MULTIPLIES_BF16

// Adds the products of pairs.
INLINE f32_register add_pair(f32_register sum, int32_t pair, u32_register words) {
#if defined(__AVX512BF16__)
    const __m512i all = _mm512_set1_epi32(pair);
    return bit_cast<f32_register>(
        _mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(all), bit_cast<__m512bh>(words)));
#else
    const bfloat16x8_t all = bit_cast<bfloat16x8_t>(vdupq_n_s32(pair));
    return bit_cast<f32_register>(vbfdotq_f32(bit_cast<float32x4_t>(sum), all, bit_cast<bfloat16x8_t>(words)));
#endif
}
template <class H, class Words> INLINE Pair<H> add_pair(Pair<H> sum, int32_t pair, Words words) {
    return {add_pair(sum.lo, pair, words.lo), add_pair(sum.hi, pair, words.hi)};
}

template <int PART, int PARTS, int ROWS, int PANELS>
INLINE void add_products(f32x16 (&sum)[ROWS][PANELS], const bf16* a, int64_t lda, const u32x16 (&words)[PANELS]) {
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) {
        const int32_t pair = load<int32_t>(a + r * lda);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sum[r][p] = add_pair(sum[r][p], pair, words[p]);
    }
}
#endif

// Where the next lines are prefetched: the address advances by `step` bytes for each vector of a panel, and there is
// one such address per panel.
struct Next {
    const char* from;
    int64_t step;
};

// Multiplies `depth` elements of rows of A and of panels that are `panel` elements apart; `is_more`: adds to C.
template <int ROWS, int PANELS, class A, class T>
INLINE void multiply_block(const A* a, int64_t lda, const T* b, int64_t panel, int64_t depth, bool is_more, Next next,
                           float* c, int64_t ldc) {
    f32x16 sum[ROWS][PANELS] = {};
    if (is_more)
        for (int r = 0; r < ROWS; r++)
            for (int p = 0; p < PANELS; p++) sum[r][p] = load16(c + r * ldc + p * LANES);
    for (int64_t k = 0; k < depth; k += Pack<T>, next.from += next.step) {
        typename Factor<T>::type words[PANELS];
        for (int p = 0; p < PANELS; p++) {
            const T* from = b + p * panel + k * LANES;
            words[p] = load<typename Factor<T>::type>(from);
            __builtin_prefetch((const char*)from + PREFETCH_BYTES);
            if (ROWS > FEW_ROWS) __builtin_prefetch(next.from + p * panel * int64_t(sizeof(T)), 0, 2);
        }
        add_products<0, Pack<T>>(sum, a + k, lda, words);
    }
    for (int r = 0; r < ROWS; r++)
        for (int p = 0; p < PANELS; p++) store16(c + r * ldc + p * LANES, sum[r][p]);
}

// Multiplies `rows` rows, up to MOST_ROWS, with one instance of the block for each number.
template <int ROWS, int PANELS, class A, class T>
INLINE void multiply_rows(int rows, const A* a, int64_t lda, const T* b, int64_t panel, int64_t depth, bool is_more,
                          Next next, float* c, int64_t ldc) {
    if (rows == ROWS)
        multiply_block<ROWS, PANELS>(a, lda, b, panel, depth, is_more, next, c, ldc);
    else if constexpr (ROWS > 1)
        multiply_rows<ROWS - 1, PANELS>(rows, a, lda, b, panel, depth, is_more, next, c, ldc);
}

// C [rows, 16 panels] (row stride ldc) = A [rows, depth] (row stride lda) B, or adds that to C: up to MOST_ROWS rows.
template <class A, class T>
static void multiply_panels(const A* a, int64_t lda, int rows, const T* b, int panels, int64_t panel, int64_t depth,
                            bool is_more, Next next, float* c, int64_t ldc) {
    for (int p = 0; p < panels;) {
        const T* part = b + p * panel;
        const Next own{next.from + p * panel * int64_t(sizeof(T)), next.step};
        const bool is_wide = rows <= FEW_ROWS && panels - p >= FEW_ROWS_PANELS;
        const int width = is_wide ? FEW_ROWS_PANELS : panels - p >= MOST_PANELS ? MOST_PANELS : 1;
        float* to = c + p * LANES;
        if (is_wide)
            multiply_rows<FEW_ROWS, FEW_ROWS_PANELS>(rows, a, lda, part, panel, depth, is_more, own, to, ldc);
        else if (width == MOST_PANELS)
            multiply_rows<MOST_ROWS, MOST_PANELS>(rows, a, lda, part, panel, depth, is_more, own, to, ldc);
        else
            multiply_rows<MOST_ROWS, 1>(rows, a, lda, part, panel, depth, is_more, own, to, ldc);
        p += width;
    }
}

// Multiplies a part of the depth; the rows need no conversion.
template <class T>
INLINE void multiply_part(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t panel, int64_t depth,
                          bool is_more, Next next, float* c, int64_t ldc) {
    multiply_panels(a, lda, rows, b, panels, panel, depth, is_more, next, c, ldc);
}

#if !defined(CHAIRLIFT_MULTIPLIES_BF16)
// Rows are widened to float once for all columns, and weights in registers.
INLINE void multiply_part(const bf16* a, int64_t lda, int rows, const bf16* b, int panels, int64_t panel,
                          int64_t depth, bool is_more, Next next, float* c, int64_t ldc) {
    constexpr int64_t STRIDE = MOST_DEPTH + LANES;  // rows a power of 2 apart would compete for few cache lines
    alignas(64) float wide[MOST_ROWS * STRIDE];
    for (int r = 0; r < rows; r++)
        for (int64_t k = 0; k < depth; k += LANES) store16(wide + r * STRIDE + k, load16(a + r * lda + k));
    multiply_panels(wide, STRIDE, rows, b, panels, panel, depth, is_more, next, c, ldc);
}
#endif

// Multiplies in blocks of rows of nearly equal size, and of the depth. With several blocks of rows, the first waits for
// memory and the others compute, so each of them prefetches a share of the next weights.
template <class T>
static void multiply_vectors(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t depth, float* c,
                             int64_t ldc, const Fetch& fetch) {
    const int blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    const int64_t panel = depth * LANES, step = fetch.is_first && blocks > 1 ? (64 + blocks - 1) / blocks : 0;
    for (int i = 0, r = 0; i < blocks; i++) {
        const int end = rows * (i + 1) / blocks;
        for (int64_t k = 0; k < depth; k += MOST_DEPTH) {
            const int64_t size = depth - k < MOST_DEPTH ? depth - k : MOST_DEPTH;
            const T* part = b + k * LANES;
            const char* next = step ? fetch.next + (i * depth + k) * 64 / Pack<T> / blocks : (const char*)part;
            multiply_part(a + r * lda + k, lda, end - r, part, panels, panel, size, k > 0, {next, step}, c + r * ldc,
                          ldc);
        }
        r = end;
    }
}

#if defined(__AMX_TILE__)

// ---- AMX: tiles of 16 rows of 64 bytes; 0-3 hold C, 4 and 5 rows of A, 6 and 7 of B ----

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};

inline thread_local int tile_shapes = -1;  // what this thread's tiles are set to

// gcc does not see that tiles and their shapes are loaded from memory: what was stored before must be there.
INLINE void finish_stores() { asm volatile("" ::: "memory"); }

// Rows of the two row tiles: 1 to 16 each, of `bytes` of A. Setting costs some 50 cycles, so only what changes is set.
INLINE void shape_tiles(int first, int second, int bytes = 64) {
    const int wanted = (bytes * 32 + first) * 32 + second;
    if (tile_shapes == wanted) return;
    tile_shapes = wanted;
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.bytes[tile] = uint16_t(tile == 4 || tile == 5 ? bytes : 64);
        shapes.rows[tile] = uint8_t(tile >= 6 ? bytes / 4 : (tile == 0 || tile == 1 || tile == 4) ? first : second);
    }
    finish_stores();
    _tile_loadconfig(&shapes);
}

// Another library in this process may shape the tiles, too, so each entry into ours shapes them again.
INLINE void forget_tiles() { tile_shapes = -1; }
INLINE void leave_tiles() { _tile_release(); }

template <bool TWO_ROW_TILES, bool TWO_PANELS>
INLINE void multiply_tiles(const bf16* a, int64_t lda, const bf16* b, int64_t depth, float* c, int64_t ldc,
                           bool is_first, Fetch& fetch) {
    constexpr int64_t STEP = 64 / sizeof(bf16), TILE = 1024 / sizeof(bf16);
    const int64_t panel = depth * LANES, stride = lda * sizeof(bf16), c_stride = ldc * 4;
    finish_stores();
    _tile_zero(0);
    if (TWO_PANELS) _tile_zero(1);
    if (TWO_ROW_TILES) _tile_zero(2);
    if (TWO_ROW_TILES && TWO_PANELS) _tile_zero(3);
    for (int64_t k = 0; k < depth; k += STEP, b += TILE) {
        if (is_first)  // the others find it in the cache
#pragma GCC unroll 16
            for (int line = 0; line < 16; line++) {
                constexpr int64_t AHEAD = TWO_ROW_TILES ? FAR_PREFETCH_BYTES : PREFETCH_BYTES;
                constexpr int LEVEL = TWO_ROW_TILES ? 2 : 3;  // the first-level cache has no room so far ahead
                __builtin_prefetch((const char*)b + AHEAD + line * 64, 0, LEVEL);
                if (TWO_PANELS) __builtin_prefetch((const char*)(b + panel) + AHEAD + line * 64, 0, LEVEL);
            }
        for (int i = 0; i < fetch.lines_per_step; i++, fetch.next += 64) __builtin_prefetch(fetch.next, 0, 2);
        _tile_stream_loadd(6, b, 64);  // the first-level cache is kept for A
        if (TWO_PANELS) _tile_stream_loadd(7, b + panel, 64);
        _tile_loadd(4, a + k, stride);
        _tile_dpbf16ps(0, 4, 6);
        if (TWO_PANELS) _tile_dpbf16ps(1, 4, 7);
        if (TWO_ROW_TILES) {
            _tile_loadd(5, a + 16 * lda + k, stride);
            _tile_dpbf16ps(2, 5, 6);
            if (TWO_PANELS) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_stride);
    if (TWO_PANELS) _tile_stored(1, c + LANES, c_stride);
    if (TWO_ROW_TILES) _tile_stored(2, c + 16 * ldc, c_stride);
    if (TWO_ROW_TILES && TWO_PANELS) _tile_stored(3, c + 16 * ldc + LANES, c_stride);
}

static void multiply(const bf16* a, int64_t lda, int rows, const bf16* b, int panels, int64_t depth, float* c,
                     int64_t ldc, Fetch fetch = {}) {
    for (int r = 0; r < rows; r += 32) {
        const int left = rows - r < 32 ? rows - r : 32;
        shape_tiles(left < 16 ? left : 16, left > 16 ? left - 16 : 16);
        for (int p = 0; p < panels; p += 2) {
            const bf16* part = b + p * depth * LANES;
            const bf16* from = a + r * lda;
            float* to = c + r * ldc + p * LANES;
            const bool is_first = fetch.is_first && r == 0;
            if (left > 16 && panels - p > 1)
                multiply_tiles<true, true>(from, lda, part, depth, to, ldc, is_first, fetch);
            else if (left > 16)
                multiply_tiles<true, false>(from, lda, part, depth, to, ldc, is_first, fetch);
            else if (panels - p > 1)
                multiply_tiles<false, true>(from, lda, part, depth, to, ldc, is_first, fetch);
            else
                multiply_tiles<false, false>(from, lda, part, depth, to, ldc, is_first, fetch);
        }
    }
}

static void multiply(const float* a, int64_t lda, int rows, const float* b, int panels, int64_t depth, float* c,
                     int64_t ldc, Fetch = {}) {
    multiply_vectors(a, lda, rows, b, panels, depth, c, ldc, {});
}

// The operating system grants tiles on request only, once per process. False if it does not.
static bool enable_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

INLINE void forget_tiles() {}
INLINE void leave_tiles() {}

template <class T>
static void multiply(const T* a, int64_t lda, int rows, const T* b, int panels, int64_t depth, float* c, int64_t ldc,
                     Fetch fetch = {}) {
    multiply_vectors(a, lda, rows, b, panels, depth, c, ldc, fetch);
}

static bool enable_tiles() { return true; }

#endif

// Reads `count` weights of a column.
template <class T> void read_column(const Matrix& matrix, int64_t column, int64_t count, float* to, const T*) {
    const T* from = static_cast<const T*>(matrix.panels) + column / LANES * LANES * matrix.depth +
                    column % LANES * Pack<T>;
    for (int64_t k = 0; k < count; k++) to[k] = to_float(from[k / Pack<T> * LANES * Pack<T> + k % Pack<T>]);
}

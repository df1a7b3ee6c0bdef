// AMX for processors that lack it: what its instructions do, as functions of the same names. It comes before the kernels.
//
// Sources: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, LDTILECFG to TILEZERO.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_INT8__ 1
#define __AMX_BF16__ 1

namespace emulated {

struct Tile {
    int rows = 0, bytes = 0;
    alignas(64) uint8_t lines[16][64] = {};
};

inline thread_local Tile tiles[8];

inline void raise_unless(bool is_right) {
    if (!is_right) __builtin_trap();  // where the processor raises an exception
}

inline void release() {
    for (Tile& tile : tiles) tile = {};
}

inline void load_config(const void* from) {  // 64 bytes: palette, bytes of the tiles' rows from 16 on, rows from 48 on
    const uint8_t* config = static_cast<const uint8_t*>(from);
    raise_unless(config[0] == 1 && config[1] == 0);
    for (int i = 2; i < 64; i++)  // reserved, or of tiles that palette 1 lacks
        raise_unless(!config[i] || (i >= 16 && i < 32) || (i >= 48 && i < 56));
    for (int t = 0; t < 8; t++) {
        uint16_t bytes;
        std::memcpy(&bytes, config + 16 + 2 * t, 2);
        tiles[t] = {config[48 + t], bytes, {}};
        raise_unless(tiles[t].rows <= 16 && bytes <= 64 && !tiles[t].rows == !bytes);
    }
}

inline Tile& tile_of(int t) {
    raise_unless(tiles[t].rows);  // it has a shape
    return tiles[t];
}

inline void zero(int t) { std::memset(tile_of(t).lines, 0, sizeof(Tile::lines)); }

inline void load(int t, const void* from, int64_t stride) {
    zero(t);
    for (int r = 0; r < tiles[t].rows; r++)
        std::memcpy(tiles[t].lines[r], static_cast<const char*>(from) + r * stride, tiles[t].bytes);
}

inline void store(int t, void* to, int64_t stride) {
    const Tile& tile = tile_of(t);
    for (int r = 0; r < tile.rows; r++)
        std::memcpy(static_cast<char*>(to) + r * stride, tile.lines[r], tile.bytes);
}

// C += A B: `add(sums, word of A, line of B)` for each row of C, and each word of that row of A with B's line of the
// word's number. `finish(line of C, sums)` is what that line becomes.
template <class Sums, class Add, class Finish> inline void multiply(int c, int a, int b, Add add, Finish finish) {
    Tile &to = tile_of(c), &rows = tile_of(a), &lines = tile_of(b);
    raise_unless(c != a && a != b && b != c);
    raise_unless(to.rows == rows.rows && rows.bytes == 4 * lines.rows && to.bytes == lines.bytes);
    for (int m = 0; m < to.rows; m++) {
        Sums sums{};
        for (int k = 0; k < lines.rows; k++) {
            int32_t word;
            std::memcpy(&word, rows.lines[m] + 4 * k, 4);
            add(sums, _mm512_set1_epi32(word), _mm512_load_si512(lines.lines[k]));
        }
        _mm512_store_si512(to.lines[m], finish(_mm512_load_si512(to.lines[m]), sums));
    }
}

inline void multiply_bytes(int c, int a, int b) {  // of A with a sign, of B without
    multiply<__m512i>(
        c, a, b, [](__m512i& sums, __m512i x, __m512i y) { sums = _mm512_dpbusd_epi32(sums, y, x); },
        [](__m512i line, __m512i sums) { return _mm512_add_epi32(line, sums); });
}

inline __m512 high_halves(__m512i words) {
    return _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(int(0xffff0000u))));
}

inline __m512 low_halves(__m512i words) { return high_halves(_mm512_slli_epi32(words, 16)); }

struct Halves {
    __m512 even{}, odd{};
};

// Products of the words' low halves and of their high ones are summed up by themselves. (Denormals stay.)
inline void multiply_bf16(int c, int a, int b) {
    multiply<Halves>(
        c, a, b,
        [](Halves& sums, __m512i x, __m512i y) {
            sums.even = _mm512_fmadd_ps(low_halves(x), low_halves(y), sums.even);
            sums.odd = _mm512_fmadd_ps(high_halves(x), high_halves(y), sums.odd);
        },
        [](__m512i line, const Halves& sums) {
            return _mm512_castps_si512(_mm512_castsi512_ps(line) + (sums.even + sums.odd));
        });
}

template <class... Arguments> long ask_system(long number, Arguments... arguments) {
    return number == SYS_arch_prctl ? 0 : syscall(number, arguments...);  // tiles need not be asked for
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#undef _tile_dpbf16ps
#define _tile_loadconfig emulated::load_config
#define _tile_release emulated::release
#define _tile_loadd emulated::load
#define _tile_stream_loadd emulated::load
#define _tile_stored emulated::store
#define _tile_zero emulated::zero
#define _tile_dpbsud emulated::multiply_bytes
#define _tile_dpbf16ps emulated::multiply_bf16
#define syscall emulated::ask_system

// The tiles of AMX: 16 rows of up to 64 bytes; 0 to 3 hold C, 4 and 5 rows of A, 6 and 7 of B. Where there are none,
// their functions do nothing.
#pragma once

#include "../vector/lanes.h"

#if defined(__AMX_TILE__)

#include <sys/syscall.h>
#include <unistd.h>

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

// The operating system grants tiles on request only, once per process. False if it does not.
static bool enable_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

#else

INLINE void forget_tiles() {}
INLINE void leave_tiles() {}
static bool enable_tiles() { return true; }

#endif

// What is requested from memory ahead of its use.
#pragma once

#include <cstdint>

// How far ahead of use tiles of weights are prefetched: few rows only wait for memory, more rows must not wait at all.
constexpr int64_t PREFETCH_BYTES = 1024, FAR_PREFETCH_BYTES = 4096;

// What to prefetch while a product is computed. Only so many cache lines can be in flight, and further requests stall:
// so a few lines are requested at a time, between multiplications.
struct Prefetch {
    bool is_first = false;       // B itself is not in the cache yet
    const char* next = nullptr;  // lines of what will be multiplied afterwards
    int lines_per_step = 0;      // of tiles
    int64_t bytes = 0;           // of vectors, in all
    int64_t panels_ahead = 0;    // of weights in groups: to the panels that are multiplied next; 0: they follow
};

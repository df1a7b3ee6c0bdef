// Memory of a pass: one piece, cut into arrays.
#pragma once

#include <cstdint>

#include "checks.h"

constexpr int64_t pad(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Cuts one piece of memory, which starts at a cache line, into arrays that do so. Without memory it counts the bytes.
struct Arena {
    char* base;
    int64_t used = 0;

    template <class T> T* allocate(int64_t count) {
        CHECK(count >= 0 && reinterpret_cast<uintptr_t>(base) % 64 == 0);
        T* start = reinterpret_cast<T*>(base + used);
        used += pad(count * int64_t(sizeof(T)), 64);
        return start;
    }
};

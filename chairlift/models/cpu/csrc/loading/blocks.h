// Blocks of GGUF files, unpacked into groups of weights: the same bits that models/gguf/blocks.py computes in torch,
// which has a word on each type. Their layouts are ggml's.
#pragma once

#include <cstring>

#include "../vector/lanes.h"

constexpr int GROUP_ELEMENTS = 32, SUPERBLOCK_GROUPS = 8;

// Where a run of blocks goes: one element of `scales` for each group, or two, and of the steps for each block.
struct Unpacked {
    uint8_t* values;  // bytes, with 4 bits two neighbours in each, with 2, 3, 5 or 6 bits in planes
    void* scales;
    void* offsets;
    uint16_t* scale_steps;
    uint16_t* offset_steps;
};

INLINE uint16_t load_bits(const uint8_t* from) {
    uint16_t bits;
    std::memcpy(&bits, from, sizeof bits);
    return bits;
}

// -8 times a float16, which is exact unless it is too large.
INLINE uint16_t times_minus_8(uint16_t bits) {
    const uint32_t size = bits & 0x7fff, sign = ~bits & 0x8000u;
    if (size > 0x7c00) return uint16_t(bits ^ 0x8000);  // no number
    if (size >= 0x400) return uint16_t(sign | (size + (3u << 10) < 0x7c00 ? size + (3u << 10) : 0x7c00));
    uint32_t steps = size << 3, exponent = 0;
    for (; steps >= 0x800; steps >>= 1) exponent++;
    return uint16_t(sign | (steps + (exponent << 10)));
}

// Halves of `count` bytes, first all low ones: two neighbours together in a byte.
INLINE void pair_halves(const uint8_t* from, int count, uint8_t* to) {
    for (int k = 0; k < count / 2; k++) {
        const uint32_t word = load_bits(from + 2 * k), low = word & 0x0f0f, high = word >> 4 & 0x0f0f;
        to[k] = uint8_t(low | low >> 4);
        to[count / 2 + k] = uint8_t(high | high >> 4);
    }
}

// Values of 5 bits, whose highest ones are bits of a number, less `zero`.
INLINE void join_fifth_bits(const uint8_t* from, const uint8_t* fifth, int zero, uint8_t* to) {
    uint32_t bits;
    std::memcpy(&bits, fifth, sizeof bits);
    for (int k = 0; k < 16; k++) {
        to[k] = uint8_t((from[k] & 15) + (bits >> k & 1) * 16 - uint32_t(zero));
        to[16 + k] = uint8_t((from[k] >> 4) + (bits >> (16 + k) & 1) * 16 - uint32_t(zero));
    }
}

// Scales and minima of the 8 groups of a block: counts of 6 bits, in 12 bytes, after their steps.
INLINE void put_counts(const uint8_t* block, int64_t place, const Unpacked& to) {
    const uint8_t* from = block + 4;
    uint8_t *scales = static_cast<uint8_t*>(to.scales) + place, *minima = static_cast<uint8_t*>(to.offsets) + place;
    for (int g = 0; g < 4; g++) {
        scales[g] = from[g] & 63;
        minima[g] = from[4 + g] & 63;
        scales[4 + g] = uint8_t((from[8 + g] & 15) | (from[g] >> 2 & 48));
        minima[4 + g] = uint8_t(from[8 + g] >> 4 | (from[4 + g] >> 2 & 48));
    }
    to.scale_steps[place / SUPERBLOCK_GROUPS] = load_bits(block);
    to.offset_steps[place / SUPERBLOCK_GROUPS] = uint16_t(load_bits(block + 2) ^ 0x8000);
}

// The plane of `WIDTH` bits of a group (models/planes.py): those from `shift` on of its 32 bytes.
template <int WIDTH> INLINE void write_plane(const uint8_t* from, int shift, uint8_t* to) {
    constexpr int SHARING = 8 / WIDTH;
    constexpr uint32_t MASK = 0x01010101u * ((1u << WIDTH) - 1);
    for (int line = 0; line < WIDTH; line++, to += 4) {
        uint32_t joined = 0;
        for (int i = 0; i < SHARING; i++, from += 4) {
            uint32_t word;
            std::memcpy(&word, from, sizeof word);
            joined |= (word >> shift & MASK) << (WIDTH * i);
        }
        std::memcpy(to, &joined, sizeof joined);
    }
}

struct Q4_0 {
    static constexpr int NUMBER = 2, NUM_BYTES = 18, NUM_BITS = 4, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        pair_halves(block + 2, 16, values);
        static_cast<uint16_t*>(to.scales)[place] = load_bits(block);
        static_cast<uint16_t*>(to.offsets)[place] = times_minus_8(load_bits(block));
    }
};

struct Q4_1 {
    static constexpr int NUMBER = 3, NUM_BYTES = 20, NUM_BITS = 4, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        pair_halves(block + 4, 16, values);
        static_cast<uint16_t*>(to.scales)[place] = load_bits(block);
        static_cast<uint16_t*>(to.offsets)[place] = load_bits(block + 2);
    }
};

struct Q5_0 {
    static constexpr int NUMBER = 6, NUM_BYTES = 22, NUM_BITS = 8, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        join_fifth_bits(block + 6, block + 2, 16, values);
        static_cast<uint16_t*>(to.scales)[place] = load_bits(block);
    }
};

struct Q5_1 {
    static constexpr int NUMBER = 7, NUM_BYTES = 24, NUM_BITS = 8, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        join_fifth_bits(block + 8, block + 4, 0, values);
        static_cast<uint16_t*>(to.scales)[place] = load_bits(block);
        static_cast<uint16_t*>(to.offsets)[place] = load_bits(block + 2);
    }
};

struct Q8_0 {
    static constexpr int NUMBER = 8, NUM_BYTES = 34, NUM_BITS = 8, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        std::memcpy(values, block + 2, GROUP_ELEMENTS);
        static_cast<uint16_t*>(to.scales)[place] = load_bits(block);
    }
};

// Codes of a table, as in MXFP4.
struct IQ4_NL {
    static constexpr int NUMBER = 20, NUM_BYTES = 18, NUM_BITS = 4, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        pair_halves(block + 2, 16, values);
        static_cast<uint16_t*>(to.scales)[place] = load_bits(block);
    }
};

struct MXFP4 {
    static constexpr int NUMBER = 39, NUM_BYTES = 17, NUM_BITS = 4, NUM_GROUPS = 1;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        pair_halves(block + 1, 16, values);
        // Half of what the format means, as the table holds twice the numbers.
        static_cast<uint8_t*>(to.scales)[place] = uint8_t(block[0] - (block[0] > 0));
    }
};

struct Q4_K {
    static constexpr int NUMBER = 12, NUM_BYTES = 144, NUM_BITS = 4, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        for (int k = 0; k < 4; k++) pair_halves(block + 16 + 32 * k, 32, values + 32 * k);
        put_counts(block, place, to);
    }
};

struct Q2_K {
    static constexpr int NUMBER = 10, NUM_BYTES = 84, NUM_BITS = 2, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++)
            write_plane<2>(block + 16 + g / 4 * 32, g % 4 * 2, values + 8 * g);
        for (int i = 0; i < 16; i++) {
            static_cast<uint8_t*>(to.scales)[2 * place + i] = block[i] & 15;
            static_cast<uint8_t*>(to.offsets)[2 * place + i] = block[i] >> 4;
        }
        to.scale_steps[place / SUPERBLOCK_GROUPS] = load_bits(block + 80);
        to.offset_steps[place / SUPERBLOCK_GROUPS] = uint16_t(load_bits(block + 82) ^ 0x8000);
    }
};

struct Q3_K {
    static constexpr int NUMBER = 11, NUM_BYTES = 110, NUM_BITS = 3, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        const uint8_t *highest = block, *low = block + 32, *counts = block + 96;
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++, values += 12) {
            write_plane<2>(low + g / 4 * 32, g % 4 * 2, values);
            write_plane<1>(highest, g, values + 8);
        }
        for (int i = 0; i < 16; i++) {
            const int four = counts[i % 8] >> (i / 8 * 4) & 15, two = counts[8 + i % 4] >> (i / 4 * 2) & 3;
            static_cast<int8_t*>(to.scales)[2 * place + i] = int8_t((four | two << 4) - 32);
        }
        to.scale_steps[place / SUPERBLOCK_GROUPS] = load_bits(block + 108);
    }
};

struct Q5_K {
    static constexpr int NUMBER = 13, NUM_BYTES = 176, NUM_BITS = 5, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        const uint8_t *fifth = block + 16, *low = block + 48;
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++, values += 20) {
            write_plane<4>(low + g / 2 * 32, g % 2 * 4, values);
            write_plane<1>(fifth, g, values + 16);
        }
        put_counts(block, place, to);
    }
};

struct Q6_K {
    static constexpr int NUMBER = 14, NUM_BYTES = 210, NUM_BITS = 6, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        const uint8_t *low = block, *high = block + 128;
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++, values += 24) {
            write_plane<4>(low + g / 4 * 64 + g % 2 * 32, g % 4 / 2 * 4, values);
            write_plane<2>(high + g / 4 * 32, g % 4 * 2, values + 16);
        }
        std::memcpy(static_cast<int8_t*>(to.scales) + 2 * place, block + 192, 16);
        to.scale_steps[place / SUPERBLOCK_GROUPS] = load_bits(block + 208);
    }
};

template <class Kind> void unpack_all(const uint8_t* blocks, int64_t count, const Unpacked& to) {
    constexpr int VALUE_BYTES = Kind::NUM_GROUPS * GROUP_ELEMENTS * Kind::NUM_BITS / 8;
    for (int64_t i = 0; i < count; i++)
        Kind::unpack(blocks + i * Kind::NUM_BYTES, to.values + i * VALUE_BYTES, i * Kind::NUM_GROUPS, to);
}

// False if blocks of that type, which has its number in files, are unknown here.
template <class Kind, class... Others>
bool unpack_kind(int number, const uint8_t* blocks, int64_t count, const Unpacked& to) {
    if (number == Kind::NUMBER) {
        unpack_all<Kind>(blocks, count, to);
        return true;
    }
    if constexpr (sizeof...(Others) > 0) return unpack_kind<Others...>(number, blocks, count, to);
    return false;
}

inline bool unpack_blocks(int number, const uint8_t* blocks, int64_t count, const Unpacked& to) {
    return unpack_kind<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K>(
        number, blocks, count, to);
}

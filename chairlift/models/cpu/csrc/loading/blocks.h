// Blocks of GGUF files, unpacked into groups of 32 weights: the same bits that models/gguf/blocks.py computes in torch,
// which has a word on each type. Their layouts are ggml's.
#pragma once

#include <cstring>

#include "../vector/lanes.h"

constexpr int GROUP_ELEMENTS = 32, SUPERBLOCK_GROUPS = 8;

// Where a run of blocks goes: one element of `scales` for each group, and of the steps for each block.
struct Unpacked {
    uint8_t* values;  // bytes, or with 4 bits two neighbours in each
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

// float16 as float32.
INLINE float widen_half(uint16_t bits) {
    const uint32_t size = bits & 0x7fff, sign = uint32_t(bits & 0x8000) << 16;
    if (size < 0x400) return bit_cast<float>(bit_cast<uint32_t>(float(size) * 0x1p-24f) | sign);
    return bit_cast<float>(((size << 13) + (size < 0x7c00 ? 112u << 23 : 224u << 23)) | sign);
}

// The smallest float16 that is not below a number, which is not negative.
INLINE uint16_t narrow_up(float x) {
    if (!(x == x)) return 0x7e00;
    if (x > 65504) return 0x7c00;
    if (x < 0x1p-14f) {
        const float steps = x * 0x1p24f;
        const uint16_t whole = uint16_t(steps);
        return uint16_t(whole + (float(whole) < steps));
    }
    const uint32_t bits = bit_cast<uint32_t>(x);
    return uint16_t((bits >> 13) - (112u << 10) + ((bits & 0x1fff) != 0));
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

// Scales and minima of the 8 groups of a block: counts of 6 bits, in 12 bytes.
struct Counts {
    uint8_t scales[SUPERBLOCK_GROUPS], minima[SUPERBLOCK_GROUPS];

    explicit Counts(const uint8_t* from) {
        for (int g = 0; g < 4; g++) {
            scales[g] = from[g] & 63;
            minima[g] = from[4 + g] & 63;
            scales[4 + g] = uint8_t((from[8 + g] & 15) | (from[g] >> 2 & 48));
            minima[4 + g] = uint8_t(from[8 + g] >> 4 | (from[4 + g] >> 2 & 48));
        }
    }
};

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
        static_cast<float*>(to.scales)[place] = power_of_two(block[0]);
    }

  private:
    // 2^(exponent - 128): half of what the format means, as the table holds twice the numbers.
    static float power_of_two(uint32_t exponent) {
        return bit_cast<float>(exponent > 1 ? (exponent - 1) << 23 : 0x00200000u << exponent);
    }
};

struct Q4_K {
    static constexpr int NUMBER = 12, NUM_BYTES = 144, NUM_BITS = 4, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        for (int k = 0; k < 4; k++) pair_halves(block + 16 + 32 * k, 32, values + 32 * k);
        const Counts counts(block + 4);
        std::memcpy(static_cast<uint8_t*>(to.scales) + place, counts.scales, SUPERBLOCK_GROUPS);
        std::memcpy(static_cast<uint8_t*>(to.offsets) + place, counts.minima, SUPERBLOCK_GROUPS);
        to.scale_steps[place / SUPERBLOCK_GROUPS] = load_bits(block);
        to.offset_steps[place / SUPERBLOCK_GROUPS] = uint16_t(load_bits(block + 2) ^ 0x8000);
    }
};

struct Q5_K {
    static constexpr int NUMBER = 13, NUM_BYTES = 176, NUM_BITS = 8, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        const uint8_t *fifth = block + 16, *low = block + 48;
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++)
            for (int k = 0; k < GROUP_ELEMENTS; k++) {
                const uint32_t four = low[g / 2 * 32 + k] >> (g % 2 * 4) & 15u;
                values[g * GROUP_ELEMENTS + k] = uint8_t(four | (fifth[k] >> g & 1u) << 4);
            }
        const Counts counts(block + 4);
        const float scale = widen_half(load_bits(block)), minimum = -widen_half(load_bits(block + 2));
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++) {
            static_cast<float*>(to.scales)[place + g] = scale * counts.scales[g];
            static_cast<float*>(to.offsets)[place + g] = minimum * counts.minima[g];
        }
    }
};

// 16 neighbours share a scale: in groups of 32 they are rounded to 255 steps.
struct Q6_K {
    static constexpr int NUMBER = 14, NUM_BYTES = 210, NUM_BITS = 8, NUM_GROUPS = SUPERBLOCK_GROUPS;
    static void unpack(const uint8_t* block, uint8_t* values, int64_t place, const Unpacked& to) {
        const float unit = widen_half(load_bits(block + 208));
        for (int g = 0; g < SUPERBLOCK_GROUPS; g++) {
            const uint8_t *low = block + g / 4 * 64 + g % 2 * 32, *high = block + 128 + g / 4 * 32;
            const int low_shift = g % 4 / 2 * 4, high_shift = g % 4 * 2;
            int8_t integers[GROUP_ELEMENTS];
            for (int k = 0; k < GROUP_ELEMENTS; k++)
                integers[k] = int8_t(int(low[k] >> low_shift & 15) + int(high[k] >> high_shift & 3) * 16 - 32);
            float scales[2], most = 0;
            for (int h = 0; h < 2; h++) {
                scales[h] = unit * int8_t(block[192 + 2 * g + h]);
                uint8_t largest = 0;
                for (int k = 0; k < 16; k++) {
                    const int8_t each = integers[16 * h + k];
                    const uint8_t size = uint8_t(each < 0 ? -each : each);
                    largest = size > largest ? size : largest;
                }
                const float reach = float(largest) * (scales[h] < 0 ? -scales[h] : scales[h]);
                most = reach <= most ? most : reach;  // also where it is no number
            }
            const uint16_t step = narrow_up(most / 127);
            static_cast<uint16_t*>(to.scales)[place + g] = step;
            uint8_t* group = values + g * GROUP_ELEMENTS;
            if (step == 0 || step >= 0x7c00) {
                std::memset(group, 0, GROUP_ELEMENTS);
                continue;
            }
            for (int h = 0; h < 2; h++) round_to_bytes(integers + 16 * h, scales[h] / widen_half(step), group + 16 * h);
        }
    }

  private:
    // To the nearest integers, of halves to even ones. None is beyond 127, since steps are rounded up.
    static void round_to_bytes(const int8_t* from, float ratio, uint8_t* to) {
        constexpr float TO_INTEGERS = 0x1.8p23f;
        for (int k = 0; k < 16; k++) to[k] = uint8_t(int((float(from[k]) * ratio + TO_INTEGERS) - TO_INTEGERS));
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
    return unpack_kind<Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q4_K, Q5_K, Q6_K>(number, blocks, count, to);
}

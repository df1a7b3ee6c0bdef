// Sixteen lanes in the registers of the instruction set: one of AVX-512, two of AVX2, four of 128 bits, as in NEON. If
// they are not one register they are a pair of halves, whose operators work on each: compilers split a vector that no
// register holds by way of memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;

#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__AVX2__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif

typedef float f32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef int32_t i32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint32_t u32_register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef uint16_t u16_register __attribute__((vector_size(2 * REGISTER_LANES)));
typedef uint8_t u8_register __attribute__((vector_size(REGISTER_LANES)));
typedef int8_t i8_register __attribute__((vector_size(REGISTER_LANES)));

template <class V> struct ElementOf {
    typedef std::remove_reference_t<decltype(std::declval<V&>()[0])> type;
};

template <class H> struct Pair {
    typedef typename ElementOf<H>::type Element;
    H lo, hi;

#define CHAIRLIFT_OPERATOR(op)                                                                           \
    friend INLINE auto operator op(Pair a, Pair b) { return make_pair(a.lo op b.lo, a.hi op b.hi); }     \
    friend INLINE auto operator op(Pair a, Element b) { return make_pair(a.lo op b, a.hi op b); }        \
    friend INLINE auto operator op(Element a, Pair b) { return make_pair(a op b.lo, a op b.hi); }
    CHAIRLIFT_OPERATOR(+)
    CHAIRLIFT_OPERATOR(-)
    CHAIRLIFT_OPERATOR(*)
    CHAIRLIFT_OPERATOR(/)
    CHAIRLIFT_OPERATOR(&)
    CHAIRLIFT_OPERATOR(|)
    CHAIRLIFT_OPERATOR(^)
    CHAIRLIFT_OPERATOR(<<)
    CHAIRLIFT_OPERATOR(>>)
    CHAIRLIFT_OPERATOR(<)
    CHAIRLIFT_OPERATOR(>)
    CHAIRLIFT_OPERATOR(>=)
    CHAIRLIFT_OPERATOR(==)
#undef CHAIRLIFT_OPERATOR
    INLINE Pair operator-() const { return {-lo, -hi}; }
    INLINE Pair& operator+=(Pair b) { return *this = *this + b; }
    INLINE Pair& operator-=(Pair b) { return *this = *this - b; }
    INLINE Pair& operator*=(Pair b) { return *this = *this * b; }

  private:
    template <class R> static INLINE Pair<R> make_pair(R a, R b) { return {a, b}; }
};

template <class H> struct ElementOf<Pair<H>> {
    typedef typename Pair<H>::Element type;
};

template <class V> struct HalfOf {
    typedef void type;
};
template <class H> struct HalfOf<Pair<H>> {
    typedef H type;
};
template <class V> using Half = typename HalfOf<V>::type;
template <class V> constexpr bool IS_PAIR = !std::is_void_v<Half<V>>;

// Sixteen lanes in registers of type R.
template <class R, int LANES_LEFT = LANES> struct Sixteen {
    typedef Pair<typename Sixteen<R, LANES_LEFT / 2>::type> type;
};
template <class R> struct Sixteen<R, REGISTER_LANES> {
    typedef R type;
};

typedef Sixteen<f32_register>::type f32x16;
typedef Sixteen<i32_register>::type i32x16;
typedef Sixteen<u32_register>::type u32x16;
typedef Sixteen<u16_register>::type u16x16;
typedef Sixteen<u8_register>::type u8x16;
typedef Sixteen<i8_register>::type i8x16;

template <class V> INLINE V load(const void* from) {
    V v;
    if constexpr (IS_PAIR<V>) {
        v.lo = load<Half<V>>(from);
        v.hi = load<Half<V>>(static_cast<const char*>(from) + sizeof v.lo);
    } else {
        std::memcpy(&v, from, sizeof v);
    }
    return v;
}

template <class V> INLINE void store_raw(void* to, V v) {
    if constexpr (IS_PAIR<V>) {
        store_raw(to, v.lo);
        store_raw(static_cast<char*>(to) + sizeof v.lo, v.hi);
    } else {
        std::memcpy(to, &v, sizeof v);
    }
}

// The register of a vector that begins with one of its lanes.
template <class R, class V> INLINE R register_of(const V& v, int lane) {
    return load<R>(reinterpret_cast<const char*>(&v) + lane * sizeof(int32_t));
}

template <class To, class From> INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof from);
    if constexpr (IS_PAIR<From> && IS_PAIR<To>) {
        return {bit_cast<Half<To>>(from.lo), bit_cast<Half<To>>(from.hi)};
    } else {
        To to;
        std::memcpy(&to, &from, sizeof to);
        return to;
    }
}

// Converts numbers to another format.
template <class To, class From> INLINE To convert(From from) {
    if constexpr (IS_PAIR<From>)
        return {convert<Half<To>>(from.lo), convert<Half<To>>(from.hi)};
    else
        return __builtin_convertvector(from, To);
}

// Lanes of `a` where the condition holds, else of `b`.
template <class C, class V> INLINE V select(C condition, V a, V b) {
    if constexpr (IS_PAIR<V>)
        return {select(condition.lo, a.lo, b.lo), select(condition.hi, a.hi, b.hi)};
    else
        return condition ? a : b;
}

INLINE f32x16 splat(float x) { return x - f32x16{}; }

// The lanes of two concatenated registers whose numbers `Index` gives.
template <class R, class Index, int... I> INLINE R shuffle(R a, R b, Index, std::integer_sequence<int, I...>) {
#if defined(__clang__)
    return __builtin_shufflevector(a, b, Index::of(I)...);
#else
    return __builtin_shuffle(a, b, i32_register{Index::of(I)...});
#endif
}

template <class Index, class R> INLINE R shuffle(R a, R b) {
    return shuffle(a, b, Index{}, std::make_integer_sequence<int, REGISTER_LANES>{});
}

// The lanes of two vectors whose number lacks the bit `WIDTH` (`WITH`: has it), to lanes without and with that bit.
template <int WIDTH, bool WITH> struct Exchange {
    static constexpr int of(int i) { return (i & WIDTH ? REGISTER_LANES + i - WIDTH : i) + (WITH ? WIDTH : 0); }
};

template <int WIDTH, bool WITH, int SIZE = LANES, class V> INLINE V exchange(V a, V b) {
    if constexpr (!IS_PAIR<V>)
        return shuffle<Exchange<WIDTH, WITH>>(a, b);
    else if constexpr (WIDTH == SIZE / 2)
        return WITH ? V{a.hi, b.hi} : V{a.lo, b.lo};
    else
        return {exchange<WIDTH, WITH, SIZE / 2>(a.lo, b.lo), exchange<WIDTH, WITH, SIZE / 2>(a.hi, b.hi)};
}

template <int WIDTH> struct Flip {
    static constexpr int of(int i) { return i ^ WIDTH; }
};

// Swaps the lanes that are `WIDTH` apart.
template <int WIDTH, int SIZE = LANES, class V> INLINE V swap(V a) {
    if constexpr (!IS_PAIR<V>)
        return shuffle<Flip<WIDTH>>(a, a);
    else if constexpr (WIDTH == SIZE / 2)
        return {a.hi, a.lo};
    else
        return {swap<WIDTH, SIZE / 2>(a.lo), swap<WIDTH, SIZE / 2>(a.hi)};
}

template <int PART> struct EveryFourth {  // of two registers: numbers PART, PART + 4, ..., then PART + 1, PART + 5, ...
    static constexpr int of(int i) { return 4 * (i % (REGISTER_LANES / 2)) + i / (REGISTER_LANES / 2) + PART; }
};

// Four vectors whose lanes belong to 0, 1, 2, 3, 0, 1, ... in turn -> those of 0, of 1, of 2 and of 3.
template <class V> INLINE void sort_by_four(const V (&v)[4], V (&rows)[4]) {
    if constexpr (IS_PAIR<V>) {
        Half<V> low[4], high[4];
        sort_by_four({v[0].lo, v[0].hi, v[1].lo, v[1].hi}, low);
        sort_by_four({v[2].lo, v[2].hi, v[3].lo, v[3].hi}, high);
        for (int i = 0; i < 4; i++) rows[i] = {low[i], high[i]};
    } else {
        constexpr int HALF = REGISTER_LANES / 2;
        const V a = shuffle<EveryFourth<0>>(v[0], v[1]), b = shuffle<EveryFourth<0>>(v[2], v[3]);
        const V c = shuffle<EveryFourth<2>>(v[0], v[1]), d = shuffle<EveryFourth<2>>(v[2], v[3]);
        rows[0] = shuffle<Exchange<HALF, false>>(a, b);
        rows[1] = shuffle<Exchange<HALF, true>>(a, b);
        rows[2] = shuffle<Exchange<HALF, false>>(c, d);
        rows[3] = shuffle<Exchange<HALF, true>>(c, d);
    }
}

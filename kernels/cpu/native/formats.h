// GGUF's weight formats as panels: 16 rows side by side, so that a lane of a vector is a row.
//
// A panel holds the file's own numbers in the file's own number of bits, in another order. The
// columns of a panel come in blocks of 32; bytes of 16 rows x 4 columns make one vector, which is
// what AVX-512's dot products of bytes want. Formats with blocks of 256 have a head of scales in
// front of each 8 blocks. The value of a number q is `scale * (q - OFFSET)`, or `scale * q + low`
// in formats with HAS_LOW.
#pragma once

#include "simd.h"

enum Format { F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, NUM_FORMATS };

// The numbers of one row's block of 32, read from a file, with its scales.
struct SourceBlock {
    uint8_t numbers[32];
    uint16_t scale, low;      // halves; of formats with heads, those of the 256
    uint8_t scales[2], lows;  // what multiplies them; Q6_K has a scale for each half of a block
};

INLINE void nibbles(const uint8_t* from, uint8_t* numbers) {
    for (int i = 0; i < 16; ++i) numbers[i] = from[i] & 15, numbers[i + 16] = from[i] >> 4;
}

INLINE void fifth_bits(const uint8_t* from, uint8_t* numbers) {
    for (int i = 0; i < 32; ++i) numbers[i] |= ((from[i / 8] >> (i % 8)) & 1) << 4;
}

INLINE uint16_t half_at(const uint8_t* from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return half;
}

// --- planes of bits: where the 64 numbers of column group g (0 to 7) of a block are --------------

// Two column groups share a vector: the first in the low four bits, the second in the high ones.
struct Nibbles {
    static constexpr int SIZE = 256;
    static INLINE Bytes get(const uint8_t* plane, int g) {
        Bytes pair = load<Bytes>(plane + 64 * (g / 2));
        return g % 2 ? pair >> 4 : low_bits(pair, 4);
    }
    static void put(uint8_t* plane, int g, int at, uint8_t number) {
        plane[64 * (g / 2) + at] |= (number & 15) << (g % 2 * 4);
    }
};

struct NibblesAndBits {  // a bit a number behind the nibbles
    static constexpr int SIZE = 256 + 64;
    static INLINE Bytes get(const uint8_t* plane, int g) {
        return add_where(Nibbles::get(plane, g), plane + 256 + 8 * g, 16);
    }
    static void put(uint8_t* plane, int g, int at, uint8_t number) {
        Nibbles::put(plane, g, at, number);
        plane[256 + 8 * g + at / 8] |= (number >> 4 & 1) << (at % 8);
    }
};

struct NibblesAndPairs {  // two bits a number behind the nibbles; four column groups share a vector
    static constexpr int SIZE = 256 + 128;
    static INLINE Bytes get(const uint8_t* plane, int g) {
        Bytes pairs = load<Bytes>(plane + 256 + 64 * (g / 4)) >> (2 * (g % 4));
        return Nibbles::get(plane, g) + times_sixteen(low_bits(pairs, 2));
    }
    static void put(uint8_t* plane, int g, int at, uint8_t number) {
        Nibbles::put(plane, g, at, number);
        plane[256 + 64 * (g / 4) + at] |= (number >> 4 & 3) << (2 * (g % 4));
    }
};

struct WholeBytes {
    static constexpr int SIZE = 512;
    static INLINE Bytes get(const uint8_t* plane, int g) { return load<Bytes>(plane + 64 * g); }
    static void put(uint8_t* plane, int g, int at, uint8_t number) { plane[64 * g + at] = number; }
};

// --- formats ------------------------------------------------------------------------------------

// What formats of 32 numbers with one scale have in common: scales of 16 rows, perhaps their lowest
// values, then the numbers.
template <class Plane, int Offset, bool HasLow>
struct Simple {
    using Numbers = Plane;
    static constexpr int OFFSET = Offset, HEAD = 0, BLOCKS = 1;
    static constexpr bool HAS_LOW = HasLow, HALVES = false;
    static constexpr int PLANE_AT = HasLow ? 64 : 32, BLOCK = PLANE_AT + Plane::SIZE;

    static INLINE Floats scale(const uint8_t*, const uint8_t* block, int) {
        return from_halves((const uint16_t*)block);
    }
    static INLINE Floats low(const uint8_t*, const uint8_t* block) {
        return from_halves((const uint16_t*)(block + 32));
    }
    static void put_scales(uint8_t*, uint8_t* block, int lane, const SourceBlock& source) {
        memcpy(block + 2 * lane, &source.scale, 2);
        if (HasLow) memcpy(block + 32 + 2 * lane, &source.low, 2);
    }
};

struct FormatQ4_0 : Simple<Nibbles, 8, false> {
    static constexpr int SOURCE = 18;  // bytes of a row's block(s) in the file
    static void read(const uint8_t* from, int, SourceBlock& to) {
        to.scale = half_at(from);
        nibbles(from + 2, to.numbers);
    }
};

struct FormatQ4_1 : Simple<Nibbles, 0, true> {
    static constexpr int SOURCE = 20;
    static void read(const uint8_t* from, int, SourceBlock& to) {
        to.scale = half_at(from), to.low = half_at(from + 2);
        nibbles(from + 4, to.numbers);
    }
};

struct FormatQ5_0 : Simple<NibblesAndBits, 16, false> {
    static constexpr int SOURCE = 22;
    static void read(const uint8_t* from, int, SourceBlock& to) {
        to.scale = half_at(from);
        nibbles(from + 6, to.numbers);
        fifth_bits(from + 2, to.numbers);
    }
};

struct FormatQ5_1 : Simple<NibblesAndBits, 0, true> {
    static constexpr int SOURCE = 24;
    static void read(const uint8_t* from, int, SourceBlock& to) {
        to.scale = half_at(from), to.low = half_at(from + 2);
        nibbles(from + 8, to.numbers);
        fifth_bits(from + 4, to.numbers);
    }
};

struct FormatQ8_0 : Simple<WholeBytes, 128, false> {
    static constexpr int SOURCE = 34;
    static void read(const uint8_t* from, int, SourceBlock& to) {
        to.scale = half_at(from);
        for (int i = 0; i < 32; ++i) to.numbers[i] = from[2 + i] ^ 0x80;
    }
};

// Q4_K and Q5_K: of 256 numbers a scale and a lowest value, of each 32 six bits that multiply them.
template <class Plane>
struct SixBitScales {
    using Numbers = Plane;
    static constexpr int OFFSET = 0, HEAD = 64, BLOCKS = 8;
    static constexpr bool HAS_LOW = true, HALVES = false;
    static constexpr int PLANE_AT = 32, BLOCK = PLANE_AT + Plane::SIZE;

    static INLINE Floats scale(const uint8_t* head, const uint8_t* block, int) {
        return from_halves((const uint16_t*)head) * from_bytes(block);
    }
    static INLINE Floats low(const uint8_t* head, const uint8_t* block) {
        return -(from_halves((const uint16_t*)(head + 32)) * from_bytes(block + 16));
    }
    static void put_scales(uint8_t* head, uint8_t* block, int lane, const SourceBlock& source) {
        memcpy(head + 2 * lane, &source.scale, 2);
        memcpy(head + 32 + 2 * lane, &source.low, 2);
        block[lane] = source.scales[0], block[16 + lane] = source.lows;
    }
    static void read_scales(const uint8_t* from, int i, SourceBlock& to) {
        to.scale = half_at(from), to.low = half_at(from + 2);
        const uint8_t* six = from + 4;
        if (i < 4) {
            to.scales[0] = six[i] & 63, to.lows = six[i + 4] & 63;
        } else {
            to.scales[0] = (six[i + 4] & 15) | (six[i - 4] >> 6 << 4);
            to.lows = (six[i + 4] >> 4) | (six[i] >> 6 << 4);
        }
    }
    // 64 numbers lie in 32 bytes: the first 32 in the low four bits
    static void read_nibbles(const uint8_t* from, int i, SourceBlock& to) {
        for (int k = 0; k < 32; ++k) to.numbers[k] = from[32 * (i / 2) + k] >> (i % 2 * 4) & 15;
    }
};

struct FormatQ4_K : SixBitScales<Nibbles> {
    static constexpr int SOURCE = 144;
    static void read(const uint8_t* from, int i, SourceBlock& to) {
        read_scales(from, i, to);
        read_nibbles(from + 16, i, to);
    }
};

struct FormatQ5_K : SixBitScales<NibblesAndBits> {
    static constexpr int SOURCE = 176;
    static void read(const uint8_t* from, int i, SourceBlock& to) {
        read_scales(from, i, to);
        read_nibbles(from + 48, i, to);
        for (int k = 0; k < 32; ++k) to.numbers[k] |= (from[16 + k] >> i & 1) << 4;
    }
};

struct FormatQ6_K {  // of 256 numbers a scale, of each 16 a signed byte that multiplies it
    using Numbers = NibblesAndPairs;
    static constexpr int OFFSET = 32, HEAD = 32, BLOCKS = 8, SOURCE = 210;
    static constexpr bool HAS_LOW = false, HALVES = true;
    static constexpr int PLANE_AT = 32, BLOCK = PLANE_AT + Numbers::SIZE;

    static INLINE Floats scale(const uint8_t* head, const uint8_t* block, int half) {
        return from_halves((const uint16_t*)head) *
               from_signed_bytes((const int8_t*)block + 16 * half);
    }
    static INLINE Floats low(const uint8_t*, const uint8_t*) { return Floats{}; }
    static void put_scales(uint8_t* head, uint8_t* block, int lane, const SourceBlock& source) {
        memcpy(head + 2 * lane, &source.scale, 2);
        block[lane] = source.scales[0], block[16 + lane] = source.scales[1];
    }
    static void read(const uint8_t* from, int i, SourceBlock& to) {
        to.scale = half_at(from + 208);
        to.scales[0] = from[192 + 2 * i], to.scales[1] = from[192 + 2 * i + 1];
        const uint8_t* low = from + 64 * (i / 4) + 32 * (i % 2);
        const uint8_t* high = from + 128 + 32 * (i / 4);
        for (int k = 0; k < 32; ++k) {
            int four = low[k] >> (i % 4 / 2 * 4) & 15, two = high[k] >> (2 * (i % 4)) & 3;
            to.numbers[k] = four | two << 4;
        }
    }
};

// --- floats: [columns][16 rows] -------------------------------------------------------------------

struct FormatF32 {
    using Number = float;
    static INLINE Floats get(const uint8_t* from) { return load<Floats>(from); }
};

struct FormatF16 {
    using Number = uint16_t;
    static INLINE Floats get(const uint8_t* from) { return from_halves((const uint16_t*)from); }
};

struct FormatBF16 {
    using Number = uint16_t;
    static INLINE Floats get(const uint8_t* from) { return from_bfloats((const uint16_t*)from); }
};

// Calls `f.template operator()<Format>()` for the format of that number.
template <class F>
INLINE void with_quantised(int format, F f) {
    switch (format) {
        case Q4_0: f(FormatQ4_0{}); break;
        case Q4_1: f(FormatQ4_1{}); break;
        case Q5_0: f(FormatQ5_0{}); break;
        case Q5_1: f(FormatQ5_1{}); break;
        case Q8_0: f(FormatQ8_0{}); break;
        case Q4_K: f(FormatQ4_K{}); break;
        case Q5_K: f(FormatQ5_K{}); break;
        case Q6_K: f(FormatQ6_K{}); break;
    }
}

template <class F>
INLINE void with_floats(int format, F f) {
    switch (format) {
        case F32: f(FormatF32{}); break;
        case F16: f(FormatF16{}); break;
        case BF16: f(FormatBF16{}); break;
    }
}

INLINE bool is_float(int format) { return format <= BF16; }

// Bytes of a panel of 16 rows.
inline int64_t panel_bytes(int format, int64_t columns) {
    int64_t bytes = 0;
    with_floats(format, [&](auto f) { bytes = columns * LANES * sizeof(typename decltype(f)::Number); });
    with_quantised(format, [&](auto f) {
        using F = decltype(f);
        bytes = columns / (32 * F::BLOCKS) * (F::HEAD + F::BLOCKS * F::BLOCK);
    });
    return bytes;
}

// Bytes of a row in the file.
inline int64_t row_bytes(int format, int64_t columns) {
    int64_t bytes = 0;
    with_floats(format, [&](auto f) { bytes = columns * sizeof(typename decltype(f)::Number); });
    with_quantised(format, [&](auto f) {
        bytes = columns / (32 * decltype(f)::BLOCKS) * decltype(f)::SOURCE;
    });
    return bytes;
}

template <class F>
void pack_row(const uint8_t* from, int64_t columns, uint8_t* panel, int lane) {
    for (int64_t group = 0; group < columns / (32 * F::BLOCKS); ++group, from += F::SOURCE) {
        uint8_t* head = panel;
        panel += F::HEAD;
        for (int i = 0; i < F::BLOCKS; ++i, panel += F::BLOCK) {
            SourceBlock source;
            F::read(from, i, source);
            F::put_scales(head, panel, lane, source);
            for (int k = 0; k < 32; ++k)
                F::Numbers::put(panel + F::PLANE_AT, k / 4, 4 * lane + k % 4, source.numbers[k]);
        }
    }
}

// One row's values.
template <class F>
void row_values(const uint8_t* panel, int lane, int64_t columns, float* out) {
    for (int64_t group = 0; group < columns / (32 * F::BLOCKS); ++group) {
        const uint8_t* head = panel;
        panel += F::HEAD;
        for (int i = 0; i < F::BLOCKS; ++i, panel += F::BLOCK) {
            const float low = F::HAS_LOW ? F::low(head, panel)[lane] : 0.0f;
            for (int g = 0; g < 8; ++g) {
                const float scale = F::scale(head, panel, g / 4)[lane];
                Bytes numbers = F::Numbers::get(panel + F::PLANE_AT, g);
                uint8_t own[64];
                store(own, numbers);
                for (int column = 0; column < 4; ++column, ++out) {
                    *out = scale * (float)((int)own[4 * lane + column] - F::OFFSET);
                    if (F::HAS_LOW) *out += low;
                }
            }
        }
    }
}

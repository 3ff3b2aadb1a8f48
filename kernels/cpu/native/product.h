// Products of activations with one panel of 16 weight rows.
//
// Activations meet quantised weights as whole numbers of 15 bits, each block of 32 with a scale of
// its own. A number is 128 * high + low, both signed bytes: two sums of products of bytes, which
// cost nothing where a product waits for memory, and the rounding is a hundredth of that of
// activations of eight bits. Activations meet 16 and 32 bit weights as floats.
//
// What a row of activations yields never depends on how many rows there are: every row adds up the
// same numbers in the same order.
#pragma once

#include <cmath>

#include "formats.h"

constexpr int LARGEST = 127 * 128 + 63;

// Rows of activations. The quantised form has blocks of 32 columns.
struct Activations {
    int64_t columns;
    float* floats;       // [rows][columns]
    int8_t *high, *low;  // [rows][columns]
    float* scales;       // [rows][columns / 32]
    float* sums;         // [rows][columns / 32], of a block's values (after rounding)
    int32_t* numbers;    // [rows][columns / 16], sums of whole numbers
};

// Write the quantised form of 32 values: block `b` of row `r`.
INLINE void quantise_block(const Activations& to, int64_t r, int64_t b, const float* values) {
    Floats halves[2] = {load<Floats>(values), load<Floats>(values + LANES)};
    float most = largest_of(greater(absolute(halves[0]), absolute(halves[1])));
    int64_t blocks = to.columns / 32;
    // no number stands for an infinity or a NaN: the scale becomes NaN, and what it multiplies
    float odd = sum_of((halves[0] - halves[0]) + (halves[1] - halves[1]));
    float scale = most / LARGEST + odd, inverse = most > 0 ? LARGEST / most : 0.0f;
    const Floats magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to a whole number
    int32_t total = 0;
    for (int half = 0; half < 2; ++half) {
        Floats whole = (halves[half] * inverse + magic) - magic;
        Floats high = (whole * (1.0f / 128) + magic) - magic;
        int64_t at = r * to.columns + 32 * b + 16 * half;
        store(to.high + at, to_bytes(to_ints(high)));
        store(to.low + at, to_bytes(to_ints(whole - high * 128.0f)));
        int32_t sum = (int32_t)sum_of(whole);  // exact: below 2^24
        to.numbers[(r * blocks + b) * 2 + half] = sum;
        total += sum;
    }
    to.scales[r * blocks + b] = scale;
    to.sums[r * blocks + b] = scale * (float)total;
}

INLINE void quantise_row(const Activations& to, int64_t r, const float* values) {
    for (int64_t b = 0; b < to.columns / 32; ++b) quantise_block(to, r, b, values + 32 * b);
}

// What a sum of products starts at, so that it comes to that of `number - OFFSET`.
template <class F>
INLINE Ints starts_at(int32_t sum_of_activations) {
#if !defined(HAS_VNNI)
    if (F::OFFSET == 128) return Ints{};  // there `dot_signed` takes the offset off
#endif
    return splat_int(-F::OFFSET * sum_of_activations);
}

template <class F>
INLINE Ints dot_of(Ints sum, Bytes weights, int32_t four) {
    if constexpr (F::OFFSET == 128) return dot_signed(sum, weights, four);
    else return dot(sum, weights, four);
}

// out[r][16] = panel x activations, for ROWS rows of activations from `row` on.
template <class F, int ROWS>
void quantised_tile(const uint8_t* panel, const Activations& x, int64_t row, float* out, int64_t stride) {
    const int64_t columns = x.columns, blocks = columns / 32;
    const int8_t *highs = x.high + row * columns, *lows = x.low + row * columns;
    const float *scales = x.scales + row * blocks, *sums = x.sums + row * blocks;
    const int32_t* numbers = x.numbers + row * blocks * 2;
    Floats total[ROWS] = {};
    for (int64_t group = 0, b = 0; group < blocks / F::BLOCKS; ++group) {
        const uint8_t* head = panel;
        panel += F::HEAD;
        for (int i = 0; i < F::BLOCKS; ++i, ++b, panel += F::BLOCK) {
            Ints high[ROWS], low[ROWS];
            for (int r = 0; r < ROWS; ++r) {
                const int32_t* own = numbers + 2 * (r * blocks + b);
                high[r] = Ints{};
                low[r] = starts_at<F>(F::HALVES ? own[0] : own[0] + own[1]);
            }
#pragma GCC unroll 8
            for (int g = 0; g < 8; ++g) {
                if (F::HALVES && g == 4) {
                    Floats scale = F::scale(head, panel, 0);
                    for (int r = 0; r < ROWS; ++r) {
                        total[r] += to_floats((high[r] << 7) + low[r]) * (scale * scales[r * blocks + b]);
                        high[r] = Ints{};
                        low[r] = starts_at<F>(numbers[2 * (r * blocks + b) + 1]);
                    }
                }
                Bytes weights = F::Numbers::get(panel + F::PLANE_AT, g);
                for (int r = 0; r < ROWS; ++r) {
                    int64_t at = r * columns + 32 * b + 4 * g;
                    high[r] = dot_of<F>(high[r], weights, load<int32_t>(highs + at));
                    low[r] = dot_of<F>(low[r], weights, load<int32_t>(lows + at));
                }
            }
            Floats scale = F::scale(head, panel, 1);
            for (int r = 0; r < ROWS; ++r)
                total[r] += to_floats((high[r] << 7) + low[r]) * (scale * scales[r * blocks + b]);
            if constexpr (F::HAS_LOW) {
                Floats lowest = F::low(head, panel);
                for (int r = 0; r < ROWS; ++r) total[r] += lowest * sums[r * blocks + b];
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) store(out + r * stride, total[r]);
}

template <class F, int ROWS>
void float_tile(const uint8_t* panel, const Activations& x, int64_t row, float* out, int64_t stride) {
    constexpr int SIZE = LANES * sizeof(typename F::Number);
    const int64_t columns = x.columns;
    const float* values = x.floats + row * columns;
    Floats even[ROWS] = {}, odd[ROWS] = {};
    int64_t k = 0;
    for (; k + 1 < columns; k += 2, panel += 2 * SIZE) {
        Floats first = F::get(panel), second = F::get(panel + SIZE);
        for (int r = 0; r < ROWS; ++r) {
            even[r] += first * values[r * columns + k];
            odd[r] += second * values[r * columns + k + 1];
        }
    }
    for (; k < columns; ++k) {
        Floats last = F::get(panel);
        for (int r = 0; r < ROWS; ++r) even[r] += last * values[r * columns + k];
    }
    for (int r = 0; r < ROWS; ++r) store(out + r * stride, even[r] + odd[r]);
}

// More rows of activations at once than registers hold would be slower than fewer.
#if defined(HAS_VNNI)
constexpr int MAX_TILE = 8;
#else
constexpr int MAX_TILE = 2;
#endif
typedef void (*Tile)(const uint8_t*, const Activations&, int64_t, float*, int64_t);

// The tile of a format for `rows` rows, or for the largest number below that there is.
template <template <class, int> class Kind, class F>
Tile tile_of(int64_t& rows) {
    if (rows >= MAX_TILE) return rows = MAX_TILE, Kind<F, MAX_TILE>::run;
    if constexpr (MAX_TILE == 8) {
        if (rows >= 6) return rows = 6, Kind<F, 6>::run;
        if (rows == 5) return Kind<F, 5>::run;
        if (rows == 4) return Kind<F, 4>::run;
        if (rows == 3) return Kind<F, 3>::run;
        if (rows == 2) return Kind<F, 2>::run;
    }
    return rows = 1, Kind<F, 1>::run;
}

template <class F, int ROWS>
struct QuantisedTile {
    static constexpr Tile run = quantised_tile<F, ROWS>;
};

template <class F, int ROWS>
struct FloatTile {
    static constexpr Tile run = float_tile<F, ROWS>;
};

// out[r][16] for activation rows [begin, end); `stride` between rows of `out`.
inline void multiply_panel(int format, const uint8_t* panel, const Activations& x, int64_t begin,
                           int64_t end, float* out, int64_t stride) {
    for (int64_t row = begin; row < end;) {
        int64_t rows = end - row;
        Tile tile = nullptr;
        with_quantised(format, [&](auto f) { tile = tile_of<QuantisedTile, decltype(f)>(rows); });
        with_floats(format, [&](auto f) { tile = tile_of<FloatTile, decltype(f)>(rows); });
        tile(panel, x, row, out + (row - begin) * stride, stride);
        row += rows;
    }
}

// --- matrices -------------------------------------------------------------------------------------

constexpr int MAX_PARTS = 4;

// Several weights side by side, each with a format of its own; a part's last panel may be partly
// empty. The fields are those of `bindings.MatrixFields`.
struct Part {
    int64_t format, rows;
    const uint8_t* panels;
};

struct Matrix {
    int64_t columns, rows, num_parts;
    const float* bias;  // [rows] or null
    Part parts[MAX_PARTS];
};

INLINE int64_t num_panels(int64_t rows) { return (rows + LANES - 1) / LANES; }

inline int64_t num_panels(const Matrix& matrix) {
    int64_t count = 0;
    for (int i = 0; i < matrix.num_parts; ++i) count += num_panels(matrix.parts[i].rows);
    return count;
}

inline bool takes_floats(const Matrix& matrix) {
    for (int i = 0; i < matrix.num_parts; ++i)
        if (is_float(matrix.parts[i].format)) return true;
    return false;
}

inline bool takes_bytes(const Matrix& matrix) {
    for (int i = 0; i < matrix.num_parts; ++i)
        if (!is_float(matrix.parts[i].format)) return true;
    return false;
}

// Panel `index` of the matrix for activation rows [begin, end), with bias, into out[row][output].
inline void multiply(const Matrix& matrix, int64_t index, const Activations& x, int64_t begin,
                     int64_t end, float* out, int64_t stride) {
    int64_t first = 0;
    const Part* part = matrix.parts;
    for (; index >= num_panels(part->rows); ++part) index -= num_panels(part->rows), first += part->rows;
    const uint8_t* panel = part->panels + index * panel_bytes(part->format, matrix.columns);
    int64_t at = first + index * LANES, count = part->rows - index * LANES;
    if (count >= LANES) {
        multiply_panel(part->format, panel, x, begin, end, out + begin * stride + at, stride);
        count = LANES;
    } else {
        float own[MAX_TILE * LANES];
        for (int64_t row = begin; row < end; row += MAX_TILE) {
            int64_t last = row + MAX_TILE < end ? row + MAX_TILE : end;
            multiply_panel(part->format, panel, x, row, last, own, LANES);
            for (int64_t r = row; r < last; ++r)
                memcpy(out + r * stride + at, own + (r - row) * LANES, count * sizeof(float));
        }
    }
    if (matrix.bias)
        for (int64_t r = begin; r < end; ++r)
            for (int64_t i = 0; i < count; ++i) out[r * stride + at + i] += matrix.bias[at + i];
}

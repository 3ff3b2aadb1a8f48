// Decoder layers of a whole step in one call: norms, projections, rotary embedding, paged
// attention and the gated feed-forward of Llama's and Gemma 3's kind.
//
// The structs are those of `kernels/cpu/bindings.py`, field by field; every field has eight bytes.
#pragma once

#include <vector>

#include "pool.h"
#include "product.h"

enum Activation { SILU, GELU_TANH };

struct Layer {
    Matrix qkv, o, gate_up, down;  // gate_up has two parts of equal size
    const float *input_norm, *mlp_norm;           // [hidden]
    const float *attention_out_norm, *mlp_out_norm;  // [hidden], or null
    const float *q_norm, *k_norm;                 // [head_dim], or null
    double eps, scale, softcap;                   // softcap 0 = none
    int64_t num_heads, num_kv_heads, head_dim, window;  // window 0 = none
    int64_t activation;
    const float* cos_sin;  // [positions][rotary_dim], cosines before sines
    int64_t rotary_dim, max_position;
    float *keys, *values;  // [slots][num_kv_heads][head_dim]
    int64_t group;
};

// Of one KV group. Rows of the block table are `table_stride` apart.
struct Group {
    const int32_t* block_table;  // [num_requests][...]
    const int64_t* slots;        // [num_rows], -1 = do not write
    int64_t table_stride, block_size;
};

struct Step {
    int64_t num_rows, num_requests, hidden;
    const int64_t* positions;       // [num_rows]
    const int32_t* query_start_loc;  // [num_requests + 1]
    const int32_t* seq_lens;         // [num_requests]
    const Group* groups;
    const float* input;  // what the first layer projects, instead of its normed stream; or null
};

// Memory of a step that grows to the largest step and stays.
struct Workspace {
    std::vector<char> memory;
    size_t used = 0;

    template <class T>
    T* take(size_t count) {
        size_t at = used;
        used += (count * sizeof(T) + 63) / 64 * 64;
        return memory.empty() ? nullptr : (T*)(memory.data() + at);
    }
    Activations activations(int64_t rows, int64_t columns) {
        int64_t blocks = columns / 32;
        Activations out;
        out.columns = columns;
        out.floats = take<float>(rows * columns);
        out.high = take<int8_t>(rows * columns);
        out.low = take<int8_t>(rows * columns);
        out.scales = take<float>(rows * blocks);
        out.sums = take<float>(rows * blocks);
        out.numbers = take<int32_t>(2 * rows * blocks);
        return out;
    }
};

INLINE void rms_norm(const float* x, const float* weight, int64_t size, double eps, float* out) {
    Floats squares = {};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) squares += load<Floats>(x + i) * load<Floats>(x + i);
    float total = sum_of(squares);
    for (int64_t k = i; k < size; ++k) total += x[k] * x[k];
    float inverse = 1.0f / std::sqrt(total / (float)size + (float)eps);
    for (i = 0; i + LANES <= size; i += LANES)
        store(out + i, load<Floats>(x + i) * load<Floats>(weight + i) * inverse);
    for (; i < size; ++i) out[i] = x[i] * weight[i] * inverse;
}

INLINE void add_to(float* sum, const float* x, int64_t size) {
    for (int64_t i = 0; i < size; ++i) sum[i] += x[i];
}

INLINE Floats activate(int64_t kind, Floats gate) {
    if (kind == SILU) return gate / (1.0f + exp_of(-gate));
    // x / 2 * (1 + tanh(u)) is x / (1 + e^-2u)
    Floats u = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return gate / (1.0f + exp_of(-2.0f * u));
}

INLINE void rotate(float* head, const float* cos_sin, int64_t rotary_dim) {
    int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        float a = head[i], b = head[i + half], c = cos_sin[i], s = cos_sin[i + half];
        head[i] = a * c - b * s;
        head[i + half] = b * c + a * s;
    }
}

// The pages of a request's tokens; slots are `stride` floats apart.
struct Pages {
    const int32_t* table;
    int64_t block_size, stride;

    // Calls `f(token, offset of its slot)` for the tokens [first, last]; divides once a page.
    template <class F>
    INLINE void each(int64_t first, int64_t last, F f) const {
        int64_t page = first / block_size, within = first % block_size;
        for (int64_t token = first; token <= last; ++page, within = 0) {
            int64_t offset = (table[page] * block_size + within) * stride;
            int64_t end = token + block_size - within;
            if (end > last + 1) end = last + 1;
            for (; token < end; ++token, offset += stride) f(token, offset);
        }
    }
};

// weights[t] = e^(scores[t] - the largest) for `count` scores, with room for whole vectors; returns
// 1 / their sum.
INLINE float softmax(float* scores, int64_t count) {
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    for (int64_t t = count; t < padded; ++t) scores[t] = -INFINITY;
    Floats most = splat(-INFINITY);
    for (int64_t t = 0; t < padded; t += LANES) most = greater(most, load<Floats>(scores + t));
    Floats largest = splat(largest_of(most)), totals = {};
    for (int64_t t = 0; t < padded; t += LANES) {
        Floats e = exp_of(load<Floats>(scores + t) - largest);
        store(scores + t, e);
        if (t + LANES <= count) totals += e;
    }
    float total = sum_of(totals);
    for (int64_t t = count / LANES * LANES; t < count; ++t) total += scores[t];
    return 1.0f / total;
}

// out = attention of one query head over the keys [first, last]; `scores` has room for them. VECTORS
// is head_dim / 16, or 0 for any.
template <int VECTORS>
void attend(const Layer& layer, const float* query, int64_t kv_head, const Pages& pages,
            int64_t first, int64_t last, float* scores, float* out) {
    const int64_t dim = layer.head_dim, vectors = VECTORS ? VECTORS : dim / LANES;
    const float *keys = layer.keys + kv_head * dim, *values = layer.values + kv_head * dim;
    const float scale = (float)layer.scale, cap = (float)layer.softcap;
    const int64_t count = last - first + 1;
    pages.each(first, last, [&](int64_t token, int64_t offset) {
        const float* key = keys + offset;
        Floats even = {}, odd = {};
        int64_t v = 0;
        for (; v + 2 <= vectors; v += 2) {
            even += load<Floats>(query + v * LANES) * load<Floats>(key + v * LANES);
            odd += load<Floats>(query + (v + 1) * LANES) * load<Floats>(key + (v + 1) * LANES);
        }
        if (v < vectors) even += load<Floats>(query + v * LANES) * load<Floats>(key + v * LANES);
        scores[token - first] = sum_of(even + odd) * scale;
    });
    if (cap > 0)
        for (int64_t t = 0; t < count; ++t) scores[t] = cap * std::tanh(scores[t] / cap);
    const float inverse = softmax(scores, count);
    constexpr int WIDE = 4;  // vectors of the output at once
    for (int64_t at = 0; at < vectors; at += WIDE) {
        Floats sums[WIDE] = {};
        if (vectors - at >= WIDE) {
            pages.each(first, last, [&](int64_t token, int64_t offset) {
                const float *value = values + offset + at * LANES, weight = scores[token - first];
                for (int v = 0; v < WIDE; ++v) sums[v] += load<Floats>(value + v * LANES) * weight;
            });
        } else {
            pages.each(first, last, [&](int64_t token, int64_t offset) {
                const float *value = values + offset + at * LANES, weight = scores[token - first];
                for (int v = 0; v < vectors - at; ++v) sums[v] += load<Floats>(value + v * LANES) * weight;
            });
        }
        for (int v = 0; v < WIDE && at + v < vectors; ++v)
            store(out + (at + v) * LANES, sums[v] * inverse);
    }
}

typedef void (*Attend)(const Layer&, const float*, int64_t, const Pages&, int64_t, int64_t, float*, float*);

INLINE Attend attend_of(int64_t head_dim) {
    switch (head_dim) {
        case 64: return attend<4>;
        case 128: return attend<8>;
        case 256: return attend<16>;
        default: return attend<0>;
    }
}

// A step's scratch memory, large enough for each of its layers.
struct Scratch {
    Activations first, hidden, attended, inner;  // what qkv, gate_up, o and down multiply
    float *qkv, *out;  // [rows][...]
    float* scores;     // [threads][longest]
    int64_t longest;
};

INLINE void prepare(const Activations& to, const Matrix& matrix, int64_t row, const float* values) {
    if (takes_bytes(matrix)) quantise_row(to, row, values);
}

// Panels of a piece of work: about four pieces a thread, so that none waits for long.
INLINE int64_t piece_of(int64_t panels, int num_threads) {
    int64_t piece = panels / (4 * num_threads);
    return piece < 1 ? 1 : piece;
}

inline void project(Pool::Worker& worker, const Matrix& matrix, const Activations& x, int64_t rows,
                    float* out, int64_t stride) {
    int64_t panels = num_panels(matrix);
    worker.share(panels, piece_of(panels, worker.num_threads), [&](int64_t begin, int64_t end) {
        for (int64_t index = begin; index < end; ++index)
            multiply(matrix, index, x, 0, rows, out, stride);
    });
}

// Norm and rotate a row's heads and store its keys and values.
inline void place_heads(const Layer& layer, const Step& step, int64_t row, float* qkv) {
    const Group& group = step.groups[layer.group];
    const int64_t dim = layer.head_dim, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
    const float* turn = layer.cos_sin + step.positions[row] * layer.rotary_dim;
    for (int64_t h = 0; h < heads + kv_heads; ++h) {
        float* head = qkv + h * dim;
        const float* norm = h < heads ? layer.q_norm : layer.k_norm;
        if (norm) rms_norm(head, norm, dim, layer.eps, head);
        rotate(head, turn, layer.rotary_dim);
    }
    int64_t slot = group.slots[row], size = kv_heads * dim;
    if (slot < 0) return;
    memcpy(layer.keys + slot * size, qkv + heads * dim, size * sizeof(float));
    memcpy(layer.values + slot * size, qkv + (heads + kv_heads) * dim, size * sizeof(float));
}

inline void attend_rows(Pool::Worker& worker, const Layer& layer, const Step& step,
                        const int32_t* request_of, const Scratch& scratch) {
    const Group& group = step.groups[layer.group];
    const int64_t dim = layer.head_dim, heads = layer.num_heads, width = heads * dim;
    const int64_t stride = (heads + 2 * layer.num_kv_heads) * dim;
    float* scores = scratch.scores + worker.thread * scratch.longest;
    const Attend own = attend_of(dim);
    // Rows come last to first: the longest first, so that the pieces at the end are short ones.
    worker.share(step.num_rows * heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t item = begin; item < end; ++item) {
            int64_t row = step.num_rows - 1 - item / heads, h = item % heads;
            int64_t request = request_of[row];
            float* out = scratch.attended.floats + row * width + h * dim;
            if (request < 0) {
                memset(out, 0, dim * sizeof(float));
                continue;
            }
            int64_t last = step.seq_lens[request] - (step.query_start_loc[request + 1] - row);
            int64_t first = layer.window && last >= layer.window ? last - layer.window + 1 : 0;
            Pages pages{group.block_table + request * group.table_stride, group.block_size,
                        layer.num_kv_heads * dim};
            int64_t kv_head = h * layer.num_kv_heads / heads;
            own(layer, scratch.qkv + row * stride + h * dim, kv_head, pages, first, last, scores, out);
        }
    });
}

// inner = activation(gate) * up, in pieces of 32 columns.
inline void gate(Pool::Worker& worker, const Layer& layer, int64_t rows, const Activations& x,
                 const Activations& inner) {
    const Matrix& matrix = layer.gate_up;
    const int64_t width = matrix.parts[0].rows, panels = num_panels(width);
    const bool as_bytes = takes_bytes(layer.down);
    worker.share((panels + 1) / 2, piece_of(panels / 2, worker.num_threads), [&](int64_t begin, int64_t end) {
        for (int64_t pair = begin; pair < end; ++pair) {
            for (int64_t row = 0; row < rows; row += MAX_TILE) {
                int64_t last = row + MAX_TILE < rows ? row + MAX_TILE : rows;
                float gates[MAX_TILE][LANES], ups[MAX_TILE][LANES];
                for (int64_t index = 2 * pair; index < 2 * pair + 2 && index < panels; ++index) {
                    const int64_t at = index * LANES;
                    const Part &g = matrix.parts[0], &u = matrix.parts[1];
                    multiply_panel(g.format, g.panels + index * panel_bytes(g.format, matrix.columns),
                                   x, row, last, gates[0], LANES);
                    multiply_panel(u.format, u.panels + index * panel_bytes(u.format, matrix.columns),
                                   x, row, last, ups[0], LANES);
                    int64_t count = width - at < LANES ? width - at : LANES;
                    for (int64_t r = row; r < last; ++r) {
                        Floats a = load<Floats>(gates[r - row]), b = load<Floats>(ups[r - row]);
                        if (matrix.bias)
                            for (int i = 0; i < count; ++i)
                                a[i] += matrix.bias[at + i], b[i] += matrix.bias[width + at + i];
                        Floats both = activate(layer.activation, a) * b;
                        memcpy(inner.floats + r * width + at, &both, count * sizeof(float));
                    }
                }
                if (as_bytes)
                    for (int64_t r = row; r < last; ++r)
                        quantise_block(inner, r, pair, inner.floats + r * width + 32 * pair);
            }
        }
    });
}

// stream [rows][hidden] goes through the layer. `input` [rows][qkv's columns], if given, is projected
// in place of the normed stream.
inline void run_layer(Pool::Worker& worker, const Layer& layer, const Step& step, const float* input,
                      const int32_t* request_of, Scratch scratch, float* stream) {
    scratch.first.columns = layer.qkv.columns;
    scratch.attended.columns = layer.o.columns;
    scratch.inner.columns = layer.down.columns;
    const int64_t rows = step.num_rows, hidden = step.hidden;
    const int64_t heads_width = (layer.num_heads + 2 * layer.num_kv_heads) * layer.head_dim;
    worker.share(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            const int64_t width = layer.qkv.columns;
            float* own = scratch.first.floats + r * width;
            if (input) memcpy(own, input + r * width, width * sizeof(float));
            else rms_norm(stream + r * hidden, layer.input_norm, hidden, layer.eps, own);
            prepare(scratch.first, layer.qkv, r, own);
        }
    });
    project(worker, layer.qkv, scratch.first, rows, scratch.qkv, heads_width);
    worker.share(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r)
            place_heads(layer, step, r, scratch.qkv + r * heads_width);
    });
    attend_rows(worker, layer, step, request_of, scratch);
    if (takes_bytes(layer.o))
        worker.share(rows, 1, [&](int64_t begin, int64_t end) {
            const int64_t width = scratch.attended.columns;
            for (int64_t r = begin; r < end; ++r)
                quantise_row(scratch.attended, r, scratch.attended.floats + r * width);
        });
    project(worker, layer.o, scratch.attended, rows, scratch.out, hidden);
    worker.share(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float *out = scratch.out + r * hidden, *normed = scratch.hidden.floats + r * hidden;
            if (layer.attention_out_norm)
                rms_norm(out, layer.attention_out_norm, hidden, layer.eps, out);
            add_to(stream + r * hidden, out, hidden);
            rms_norm(stream + r * hidden, layer.mlp_norm, hidden, layer.eps, normed);
            prepare(scratch.hidden, layer.gate_up, r, normed);
        }
    });
    gate(worker, layer, rows, scratch.hidden, scratch.inner);
    project(worker, layer.down, scratch.inner, rows, scratch.out, hidden);
    worker.share(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            float* out = scratch.out + r * hidden;
            if (layer.mlp_out_norm) rms_norm(out, layer.mlp_out_norm, hidden, layer.eps, out);
            add_to(stream + r * hidden, out, hidden);
        }
    });
}

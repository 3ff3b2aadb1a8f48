// What Python calls: see kernels/cpu/bindings.py. Every function takes plain pointers and numbers.
#include <algorithm>

#include "layer.h"

extern "C" {

int64_t slipstream_panel_bytes(int64_t format, int64_t columns) { return panel_bytes(format, columns); }

// Pack rows of a file: `order[i]` is the row of the file that becomes row i.
void slipstream_pack(int64_t format, const uint8_t* rows, const int64_t* order, int64_t num_rows,
                     int64_t columns, uint8_t* panels) {
    const int64_t row_size = row_bytes(format, columns), panel_size = panel_bytes(format, columns);
    memset(panels, 0, num_panels(num_rows) * panel_size);
    for (int64_t i = 0; i < num_rows; ++i) {
        const uint8_t* from = rows + (order ? order[i] : i) * row_size;
        uint8_t* panel = panels + i / LANES * panel_size;
        int lane = i % LANES;
        with_quantised(format, [&](auto f) { pack_row<decltype(f)>(from, columns, panel, lane); });
        with_floats(format, [&](auto f) {
            constexpr int SIZE = sizeof(typename decltype(f)::Number);
            for (int64_t k = 0; k < columns; ++k)
                memcpy(panel + (k * LANES + lane) * SIZE, from + k * SIZE, SIZE);
        });
    }
}

// out[i] = row `ids[i]` of the panels as floats; `out` has num_ids x columns.
void slipstream_rows(int64_t format, const uint8_t* panels, int64_t columns, const int64_t* ids,
                     int64_t num_ids, float* out) {
    const int64_t panel_size = panel_bytes(format, columns);
    for (int64_t n = 0; n < num_ids; ++n, out += columns) {
        const uint8_t* panel = panels + ids[n] / LANES * panel_size;
        const int lane = ids[n] % LANES;
        with_quantised(format, [&](auto f) { row_values<decltype(f)>(panel, lane, columns, out); });
        with_floats(format, [&](auto f) {
            using F = decltype(f);
            for (int64_t k = 0; k < columns; ++k)
                out[k] = F::get(panel + k * LANES * sizeof(typename F::Number))[lane];
        });
    }
}

// out [rows][matrix.rows] = x [rows][matrix.columns] x matrix.
void slipstream_linear(const Matrix* matrix, const float* x, int64_t rows, float* out, int64_t num_threads) {
    static thread_local Workspace workspace;
    Activations in;
    for (int pass = 0; pass < 2; ++pass) {
        workspace.used = 0;
        in = workspace.activations(rows, matrix->columns);
        if (workspace.memory.size() < workspace.used + 64) workspace.memory.resize(workspace.used + 64);
    }
    in.floats = const_cast<float*>(x);
    const bool as_bytes = takes_bytes(*matrix);
    Pool::get().run(num_threads, [&](Pool::Worker& worker) {
        if (as_bytes)
            worker.share(rows, 1, [&](int64_t begin, int64_t end) {
                for (int64_t r = begin; r < end; ++r) quantise_row(in, r, x + r * matrix->columns);
            });
        project(worker, *matrix, in, rows, out, matrix->rows);
    });
}

// stream [rows][hidden] goes through `num_layers` layers.
void slipstream_layers(const Layer* const* layers, int64_t num_layers, const Step* step, float* stream,
                       int64_t num_threads) {
    static thread_local Workspace workspace;
    const int64_t rows = step->num_rows;
    std::vector<int32_t> request_of(rows, -1);
    int64_t longest = 0;
    for (int64_t n = 0; n < step->num_requests; ++n) {
        if (step->seq_lens[n] > longest) longest = step->seq_lens[n];
        if (step->seq_lens[n] > 0)
            for (int64_t r = step->query_start_loc[n]; r < step->query_start_loc[n + 1]; ++r)
                request_of[r] = n;
    }
    Scratch scratch;
    scratch.longest = (longest + 63) / 64 * 64 + 64;
    int64_t first = 0, heads = 0, inner = 0, qkv = 0;
    for (int64_t i = 0; i < num_layers; ++i) {
        first = std::max(first, layers[i]->qkv.columns);
        heads = std::max(heads, layers[i]->o.columns);
        inner = std::max(inner, layers[i]->down.columns);
        qkv = std::max(qkv, layers[i]->qkv.rows);
    }
    for (int pass = 0; pass < 2; ++pass) {
        workspace.used = 0;
        scratch.first = workspace.activations(rows, first);
        scratch.hidden = workspace.activations(rows, step->hidden);
        scratch.attended = workspace.activations(rows, heads);
        scratch.inner = workspace.activations(rows, inner);
        scratch.qkv = workspace.take<float>(rows * qkv);
        scratch.out = workspace.take<float>(rows * step->hidden);
        scratch.scores = workspace.take<float>(num_threads * scratch.longest);
        if (workspace.memory.size() < workspace.used + 64) workspace.memory.resize(workspace.used + 64);
    }
    Pool::get().run(num_threads, [&](Pool::Worker& worker) {
        for (int64_t i = 0; i < num_layers; ++i)
            run_layer(worker, *layers[i], *step, i ? nullptr : step->input, request_of.data(),
                      scratch, stream);
    });
}

}  // extern "C"

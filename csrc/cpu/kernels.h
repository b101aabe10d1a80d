// The CPU kernels. Raw pointers only: nothing here knows Python or torch, and nothing is checked: every shape and
// every index has been validated by the caller (csrc/bindings_cpu.cpp). Strides are in elements and lie between
// consecutive rows; everything inside a row is contiguous.
//
// Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, B block size, N blocks, C hidden size,
// F ffn size, V vocabulary, R logits rows.
#pragma once

#include <cstdint>
#include <limits>

#include "cpu/isa.h"
#include "cpu/packed_matrix.h"
#include "cpu/read_ahead.h"

namespace twinfer::cpu {

// Row-major matrix whose rows may lie apart, such as a slice of a fused projection.
template <class T>
struct Rows {
  T* data;
  int64_t stride;

  T* operator[](int64_t row) const { return data + row * stride; }
};

struct CacheWrite {
  Rows<const float> key;          // [T, Hkv*D]
  Rows<const float> value;        // [T, Hkv*D]
  float* k_cache;                 // [N, B, Hkv, D]
  float* v_cache;                 // [N, B, Hkv, D]
  const int64_t* slot_mapping;    // [T], block * B + offset
  int64_t num_tokens;             // T
  int64_t row_size;               // Hkv * D
};
void reshape_and_cache(const CacheWrite& args, int threads);

struct SwapBlocks {
  const float* source;            // [Ns, block]
  float* target;                  // [Nt, block], may be `source`
  const int64_t* block_mapping;   // [P, 2], pairs (from, to); no block is written that another pair reads or writes
  int64_t num_pairs;              // P
  int64_t block_floats;           // B * Hkv * D
};
void swap_blocks(const SwapBlocks& args, int threads);

// Longer than every context, and far enough from the end of the type: a position minus it and minus a tile still fits.
constexpr int64_t kNoWindow = std::numeric_limits<int64_t>::max() / 4;

struct PagedAttention {
  Rows<float> out;                // [T, H*D]
  Rows<const float> query;        // [T, H*D]
  const float* k_cache;           // [N, B, Hkv, D]
  const float* v_cache;           // [N, B, Hkv, D]
  Rows<const int32_t> block_tables;    // [S, max_blocks]
  const int32_t* query_start_loc;      // [S + 1]
  const int32_t* seq_lens;             // [S]
  int64_t num_seqs;               // S
  int num_heads;                  // H
  int num_kv_heads;               // Hkv
  int head_dim;                   // D
  int block_size;                 // B
  int64_t sliding_window;         // keys that a query sees, its own included; kNoWindow: all
  float scale;
};
void paged_attention(const PagedAttention& args, Isa isa, int threads);

// The lines of K and V that each of the threads will read, in this order, as far as they are worth asking for ahead. A
// block of several sequences stands there once.
ContextLines lines_to_read(const PagedAttention& args, int threads);

struct Linear {
  Rows<float> out;                // [T, F]
  Rows<const float> x;            // [T, C]
  const PackedMatrix* weight;     // [F, C]
  const float* bias;              // [F], may be null
  int64_t num_tokens;             // T
  ReadAhead ahead{};              // asked for meanwhile
};
void linear(const Linear& args, Isa isa, int threads);

// out = silu(x Wg^T + bg) * (x Wu^T + bu), where Wg and Wu are the halves of the weight, each of whole tiles.
struct LinearSiluAndMul {
  Rows<float> out;                // [T, F]
  Rows<const float> x;            // [T, C]
  const PackedMatrix* weight;     // [2F, C]
  const float* bias;              // [2F], may be null
  int64_t num_tokens;             // T
  ReadAhead ahead{};              // asked for meanwhile
};
void linear_silu_and_mul(const LinearSiluAndMul& args, Isa isa, int threads);

// Whether the second half of a matrix begins a tile of its own.
bool has_equal_halves(const PackedMatrix& weight);

struct LinearArgmax {
  int64_t* out;                   // [T], the column of the largest output, -1 for a row with a NaN
  Rows<const float> x;            // [T, C]
  const PackedMatrix* weight;     // [F, C]
  int64_t num_tokens;             // T
};
void linear_argmax(const LinearArgmax& args, Isa isa, int threads);

// How many outputs stand in one tile of a matrix for this instruction set.
int tile_columns(Isa isa);

struct Embedding {
  Rows<float> out;                // [T, C]
  const int32_t* ids;             // [T], rows of the weight
  const PackedMatrix* weight;     // [F, C]
  int64_t num_tokens;             // T
};
void embedding(const Embedding& args, int threads);

struct PositionEmbedding {
  Rows<float> out;                // [T, C]
  const int64_t* positions;       // [T], rows of the table
  const float* table;             // [P, C]
  int64_t num_tokens;             // T
  int64_t hidden_size;            // C
};
void position_embedding(const PositionEmbedding& args, int threads);

struct RmsNorm {
  Rows<float> out;                // [T, C]
  Rows<const float> x;            // [T, C], may be `out`
  const float* weight;            // [C]
  int64_t num_tokens;             // T
  int64_t hidden_size;            // C
  float eps;
};
void rms_norm(const RmsNorm& args, Isa isa, int threads);

struct HeadRmsNorm {
  Rows<float> x;                  // [T, H*D]
  const float* weight;            // [D]
  int64_t num_tokens;             // T
  int64_t num_heads;              // H
  int64_t head_dim;               // D
  float eps;
};
void head_rms_norm(const HeadRmsNorm& args, Isa isa, int threads);

struct FusedAddRmsNorm {
  Rows<float> x;                  // [T, C]
  Rows<float> residual;           // [T, C]
  const float* weight;            // [C]
  int64_t num_tokens;             // T
  int64_t hidden_size;            // C
  float eps;
};
void fused_add_rms_norm(const FusedAddRmsNorm& args, Isa isa, int threads);

struct LayerNorm {
  Rows<float> out;                // [T, C]
  Rows<const float> x;            // [T, C]
  const float* weight;            // [C]
  const float* bias;              // [C]
  int64_t num_tokens;             // T
  int64_t hidden_size;            // C
  float eps;
};
void layer_norm(const LayerNorm& args, Isa isa, int threads);

struct FusedAddLayerNorm {
  Rows<float> x;                  // [T, C]
  Rows<float> residual;           // [T, C]
  const float* weight;            // [C]
  const float* bias;              // [C]
  int64_t num_tokens;             // T
  int64_t hidden_size;            // C
  float eps;
};
void fused_add_layer_norm(const FusedAddLayerNorm& args, Isa isa, int threads);

struct RotaryEmbedding {
  const int64_t* positions;       // [T]
  Rows<float> query;              // [T, H*D]
  Rows<float> key;                // [T, Hkv*D]
  const float* cos_sin_cache;     // [max_pos, D], a row is cos (D/2) then sin (D/2)
  int64_t num_tokens;             // T
  int num_heads;                  // H
  int num_kv_heads;               // Hkv
  int head_dim;                   // D
};
void rotary_embedding(const RotaryEmbedding& args, Isa isa, int threads);

struct SiluAndMul {
  Rows<float> out;                // [T, F]
  Rows<const float> gate_up;      // [T, 2F]
  int64_t num_tokens;             // T
  int64_t ffn_size;               // F
};
void silu_and_mul(const SiluAndMul& args, Isa isa, int threads);

struct Gelu {
  Rows<float> out;                // [T, F]
  Rows<const float> x;            // [T, F]
  int64_t num_tokens;             // T
  int64_t ffn_size;               // F
};
void gelu(const Gelu& args, Isa isa, int threads);

struct TokenBitmask {
  Rows<float> logits;             // [R, V], changed in place
  const int64_t* rows;            // [P], ascending: the rows to mask
  const int32_t* bitmasks;        // [P, W], W = ceil(V / 32); bit t % 32 of word t / 32 set: token t is kept
  int64_t num_masked;             // P
  int64_t vocab_size;             // V
};
void apply_token_bitmask(const TokenBitmask& args, Isa isa, int threads);

// Lists of unequal length, one for each processed row: list p is ids[starts[p] : starts[p + 1]].
struct IdLists {
  const int64_t* starts;          // [P + 1]
  const int32_t* ids;
};

struct ProcessLogits {
  Rows<float> logits;             // [R, V], changed in place
  const int64_t* rows;            // [P], ascending: the rows to process
  IdLists allowed;                // ascending ids; an empty list allows all
  IdLists masked;
  IdLists biased;                 // distinct ids
  const double* biases;           // one for each biased id
  IdLists seen;                   // distinct ids that penalties look at
  const int32_t* counts;          // one for each seen id: how often it is in the output
  const double* repetition_penalty;   // [P]
  const double* presence_penalty;     // [P]
  const double* frequency_penalty;    // [P]
  int64_t num_processed;          // P
  int64_t vocab_size;             // V
};
void process_logits(const ProcessLogits& args, Isa isa, int threads);

struct Sample {
  Rows<const float> logits;       // [R, V]
  const double* temperature;      // [R]
  const int32_t* top_k;           // [R], 0 or -1 = off
  const double* top_p;            // [R]
  const double* min_p;            // [R], 0 = off
  const int64_t* seeds;           // [R], bit pattern of an unsigned 64-bit seed
  const int64_t* output_positions;    // [R]
  int64_t* out;                   // [R], -1 for a row with a NaN
  int64_t num_rows;               // R
  int64_t vocab_size;             // V
};
void sample(const Sample& args, Isa isa, int threads);

void gumbel_noise(uint64_t seed, uint32_t output_position, double* out, int64_t vocab_size);

}  // namespace twinfer::cpu

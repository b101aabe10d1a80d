// What each kernel is called with. Raw pointers only; nothing is checked here or later: the bindings have done it.
// A stride is the number of elements between consecutive rows, everything inside a row is contiguous.
//
// Shapes: T tokens, S sequences, H query heads, Hkv KV heads, D head dim, B block size, N blocks, P pairs or splits,
// C hidden size, F ffn size, V vocabulary, R logits rows.
#pragma once

#include <cstdint>

namespace twinfer::device {

template <class T>
struct RmsNormArguments {
  T* out;                         // [T, C]; may be `x`
  const T* x;                     // [T, C]
  T* residual;                    // [T, C], with kAdd only
  const T* weight;                // [C]
  int64_t out_stride, x_stride, residual_stride;      // elements between rows
  int num_tokens;                 // T
  int hidden_size;                // C
  float eps;
};

template <class T>
struct LayerNormArguments {
  T* out;                         // [T, C]; may be `x`
  const T* x;                     // [T, C]
  const T* weight;                // [C]
  const T* bias;                  // [C]
  int64_t out_stride, x_stride;
  int num_tokens;                 // T
  int hidden_size;                // C
  float eps;
};

template <class T>
struct CacheWriteArguments {
  const T* key;                   // [T, Hkv*D]
  const T* value;                 // [T, Hkv*D]
  T* k_cache;                     // [N*B, Hkv*D]
  T* v_cache;                     // [N*B, Hkv*D]
  const int64_t* slot_mapping;    // [T]
  int64_t key_stride, value_stride;   // elements between tokens
  int num_tokens;                 // T
  int row_size;                   // Hkv * D
};

template <class T>
struct CopyBlocksArguments {
  T* k_cache;                     // [N, B*Hkv*D]
  T* v_cache;                     // [N, B*Hkv*D]
  const int64_t* pairs;           // [P, 2]
  int num_pairs;                  // P
  int64_t block_elements;         // B * Hkv * D
};

template <class T>
struct SwapBlocksArguments {
  const T* source;                // [Ns, B*Hkv*D]
  T* target;                      // [Nt, B*Hkv*D]
  const int64_t* pairs;           // [P, 2], block of the source, block of the target
  int num_pairs;                  // P
  int64_t block_elements;         // B * Hkv * D
};

template <class T>
struct PagedAttentionArguments {
  T* out;                         // [S, H*D]
  const T* query;                 // [S, H*D]
  const T* k_cache;               // [N, B, Hkv, D]
  const T* v_cache;               // [N, B, Hkv, D]
  const int32_t* block_tables;    // [S, max_blocks]
  const int32_t* seq_lens;        // [S], tokens in the cache; 0 gives a row of zeros
  int64_t out_stride, query_stride, table_stride;
  int num_seqs;                   // S
  int num_heads;                  // H
  int num_kv_heads;               // Hkv
  int head_dim;                   // D
  int block_size;                 // B
  int window;                     // newest tokens that are seen; 0: all
  float scale;
  // For the rungs that split the context over blocks of threads: the memory in which the splits' results meet.
  float* split_out;               // [S, H, P, D], each split's own softmax-weighted mean of V
  float* split_max;               // [S, H, P], its largest logit
  float* split_sum;               // [S, H, P], its sum of exp(logit - largest)
  int num_splits;                 // P
};

template <class T>
struct PrefillAttentionArguments {
  T* out;                         // [T, H*D]
  const T* query;                 // [T, H*D]
  const T* k_cache;               // [N, B, Hkv, D]
  const T* v_cache;               // [N, B, Hkv, D]
  const int32_t* block_tables;    // [S, max_blocks]
  const int32_t* query_start_loc; // [S + 1], from 0 to T: rows query_start_loc[s] on are the newest tokens of sequence s
  const int32_t* seq_lens;        // [S], tokens in the cache, those of the query rows included
  int64_t out_stride, query_stride, table_stride;
  int num_tokens;                 // T
  int num_seqs;                   // S
  int num_heads;                  // H
  int num_kv_heads;               // Hkv
  int head_dim;                   // D
  int block_size;                 // B
  int window;                     // newest tokens that a query sees, itself included; 0: all
  float scale;
};

template <class T>
struct SiluMulArguments {
  T* out;                         // [T, F]
  const T* gate_up;               // [T, 2F]
  int64_t out_stride, gate_up_stride;
  int num_tokens;                 // T
  int ffn_size;                   // F
};

template <class T>
struct GeluArguments {
  T* out;                         // [T, F]; may be `x`
  const T* x;                     // [T, F]
  int64_t out_stride, x_stride;
  int num_tokens;                 // T
  int ffn_size;                   // F
};

template <class T>
struct RotaryArguments {
  const int64_t* positions;       // [T]
  T* query;                       // [T, H*D], in place
  T* key;                         // [T, Hkv*D], in place
  const float* cos_sin_cache;     // [max_pos, D], a row is cos (D/2) then sin (D/2)
  int64_t query_stride, key_stride;
  int num_tokens;                 // T
  int num_heads;                  // H
  int num_kv_heads;               // Hkv
  int head_dim;                   // D
};

template <class T>
struct SoftmaxArguments {
  T* out;                         // [R, V]; may be `x`
  const T* x;                     // [R, V]
  int64_t out_stride, x_stride;
  int num_rows;                   // R
  int row_size;                   // V
};

template <class T>
struct ArgmaxArguments {
  int64_t* out;                   // [R], -1 for a row with a NaN
  const T* x;                     // [R, V]
  int64_t x_stride;
  int num_rows;                   // R
  int row_size;                   // V
};

struct PhiloxArguments {
  int32_t* out;                   // [R, V], bit patterns of unsigned words
  const int64_t* seeds;           // [R], bit patterns of unsigned numbers
  const int64_t* output_positions;    // [R], below 2^32
  int64_t out_stride;
  int num_rows;                   // R
  int vocab_size;                 // V
};

// Lists of unequal length, one for each processed row: list p is ids[starts[p] : starts[p + 1]].
struct IdLists {
  const int64_t* starts;          // [P + 1]
  const int32_t* ids;
};

struct ProcessLogitsArguments {
  float* logits;                  // [R, V], changed in place
  int64_t logits_stride;
  const int64_t* rows;            // [P], ascending: the rows to process
  IdLists allowed;                // ascending ids; an empty list allows all
  IdLists masked;                 // distinct ids, as in those below
  IdLists biased;
  const double* biases;           // one for each biased id
  IdLists seen;                   // ids that penalties look at
  const int32_t* counts;          // one for each seen id: how often it is in the output
  const double* repetition_penalty;   // [P]
  const double* presence_penalty;     // [P]
  const double* frequency_penalty;    // [P]
  int num_processed;              // P
  int vocab_size;                 // V
};

template <class T>
struct SampleArguments {
  const T* logits;                // [R, V]
  int64_t logits_stride;
  const double* temperature;      // [R]
  const int32_t* top_k;           // [R], 0 or -1 = off
  const double* top_p;            // [R]
  const double* min_p;            // [R], 0 = off
  const int64_t* seeds;           // [R], bit patterns of unsigned numbers
  const int64_t* output_positions;    // [R]
  int64_t* out;                   // [R], -1 for a row with a NaN
  int num_rows;                   // R
  int vocab_size;                 // V
};

}  // namespace twinfer::device

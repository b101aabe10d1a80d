// The module fast._simt: the kernels of csrc/kernels under the emulator. Every argument is checked here, before a
// kernel sees it; nothing is written when a check fails. The GIL is released while a kernel runs. In Python
// std::invalid_argument is ValueError, and what the emulator finds wrong in a kernel (simt::Error) is RuntimeError.
#include <algorithm>
#include <limits>
#include <unordered_set>

#include "device_call.h"

namespace twinfer {
namespace {

constexpr int64_t kLargestHeadDim = 256;

void norm(py::handle out, py::handle x, py::handle residual, py::handle weight, double eps,
          const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("x", x);
  const TensorView in = args.tensor("x", x, dtype, kRows, {"T", "C"});
  const TensorView o = args.tensor("out", out, dtype, kRows, {"T", "C"});
  const TensorView res = args.tensor("residual", residual.is_none() ? x : residual, dtype, kRows, {"T", "C"});
  const TensorView w = args.tensor("weight", weight, dtype, kContiguous, {"C"});
  const int rung = device::rung_number("rms_norm", rung_name);
  const int tokens = as_int("x", args["T"]), hidden = as_int("x", args["C"]);
  const bool add = !residual.is_none();
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::rms_norm<T>({o.data<T>(), in.data<const T>(), add ? res.data<T>() : nullptr, w.data<const T>(),
                         row_stride(o), row_stride(in), add ? row_stride(res) : 0, tokens, hidden,
                         static_cast<float>(eps)},
                        rung, stream);
  });
}

void rms_norm(py::handle out, py::handle x, py::handle weight, double eps, const std::string& rung,
              const Launch& how) {
  norm(out, x, py::none(), weight, eps, rung, how);
}

void fused_add_rms_norm(py::handle x, py::handle residual, py::handle weight, double eps, const std::string& rung,
                        const Launch& how) {
  norm(x, x, residual, weight, eps, rung, how);
}

void layer_norm(py::handle out, py::handle x, py::handle weight, py::handle bias, double eps,
                const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("x", x);
  const TensorView in = args.tensor("x", x, dtype, kRows, {"T", "C"});
  const TensorView o = args.tensor("out", out, dtype, kRows, {"T", "C"});
  const TensorView w = args.tensor("weight", weight, dtype, kContiguous, {"C"});
  const TensorView b = args.tensor("bias", bias, dtype, kContiguous, {"C"});
  const int rung = device::rung_number("layer_norm", rung_name);
  const int tokens = as_int("x", args["T"]), hidden = as_int("x", args["C"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::layer_norm<T>({o.data<T>(), in.data<const T>(), w.data<const T>(), b.data<const T>(), row_stride(o),
                           row_stride(in), tokens, hidden, static_cast<float>(eps)},
                          rung, stream);
  });
}

// Two tokens in one slot would be written at the same time; -1 is no slot.
void check_slots(const int64_t* slots, int64_t count, int64_t num_slots) {
  if (!kReadsIndices) return;
  check_range("slot_mapping", slots, count, -1, num_slots, "(N * B slots, or -1)");
  std::unordered_set<int64_t> seen;
  for (int64_t i = 0; i < count; ++i) {
    if (slots[i] == -1 || seen.insert(slots[i]).second) continue;
    reject("slot_mapping: expected distinct values, got " + std::to_string(slots[i]) + " again at index " +
           std::to_string(i) + ".");
  }
}

void reshape_and_cache(py::handle key, py::handle value, py::handle k_cache, py::handle v_cache,
                       py::handle slot_mapping, const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("key", key);
  const TensorView k = args.tensor("key", key, dtype, kRows, {"T", "Hkv", "D"});
  const TensorView v = args.tensor("value", value, dtype, kRows, {"T", "Hkv", "D"});
  const TensorView kc = args.tensor("k_cache", k_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView vc = args.tensor("v_cache", v_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView slots = args.tensor("slot_mapping", slot_mapping, kInt64, kContiguous, {"T"});
  check_slots(slots.data<const int64_t>(), args["T"], args["N"] * args["B"]);
  const int rung = device::rung_number("cache_write", rung_name);
  const int tokens = as_int("key", args["T"]), row_size = as_int("key", args["Hkv"] * args["D"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::cache_write<T>({k.data<const T>(), v.data<const T>(), kc.data<T>(), vc.data<T>(),
                            slots.data<const int64_t>(), row_stride(k), row_stride(v), tokens, row_size},
                           rung, stream);
  });
}

// Pairs are copied at the same time, so no block may be written twice, or read by one pair and written by another.
void check_pairs(const int64_t* pairs, int64_t count, int64_t num_blocks) {
  if (!kReadsIndices) return;
  check_range("block_mapping", pairs, 2 * count, 0, num_blocks, "(N blocks)");
  std::unordered_set<int64_t> read, written;
  for (int64_t p = 0; p < count; ++p) read.insert(pairs[2 * p]);
  for (int64_t p = 0; p < count; ++p) {
    const int64_t target = pairs[2 * p + 1];
    if (!written.insert(target).second) {
      reject("block_mapping: expected different target blocks, got " + std::to_string(target) + " again in pair " +
             std::to_string(p) + ".");
    }
    if (read.count(target) != 0) {
      reject("block_mapping: expected target blocks that no pair copies from, got " + std::to_string(target) +
             " in pair " + std::to_string(p) + ".");
    }
  }
}

void copy_blocks(py::handle k_cache, py::handle v_cache, py::handle block_mapping, const std::string& rung_name,
                 const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("k_cache", k_cache);
  const TensorView kc = args.tensor("k_cache", k_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView vc = args.tensor("v_cache", v_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  args.define("2", 2);
  const TensorView pairs = args.tensor("block_mapping", block_mapping, kInt64, kContiguous, {"P", "2"});
  check_pairs(pairs.data<const int64_t>(), args["P"], args["N"]);
  const int rung = device::rung_number("copy_blocks", rung_name);
  const int count = as_int("block_mapping", args["P"]);
  const int block_elements = as_int("k_cache", args["B"] * args["Hkv"] * args["D"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::copy_blocks<T>({kc.data<T>(), vc.data<T>(), pairs.data<const int64_t>(), count, block_elements},
                           rung, stream);
  });
}

void check_block(int32_t block, int64_t entry, const std::string& of, const Arguments& args) {
  if (block >= 0 && block < args["N"]) return;
  reject("block_tables: expected blocks in [0, " + std::to_string(args["N"]) + "), got " + std::to_string(block) +
         " at entry " + std::to_string(entry) + of + ".");
}

void check_swaps(const int64_t* pairs, int64_t count, const Arguments& args) {
  if (!kReadsIndices) return;
  std::unordered_set<int64_t> written;
  for (int64_t p = 0; p < count; ++p) {
    check_range("block_mapping", pairs + 2 * p, 1, 0, args["Ns"], "(blocks of the source)");
    check_range("block_mapping", pairs + 2 * p + 1, 1, 0, args["Nt"], "(blocks of the target)");
    if (written.insert(pairs[2 * p + 1]).second) continue;
    reject("block_mapping: expected different target blocks, got " + std::to_string(pairs[2 * p + 1]) +
           " again in pair " + std::to_string(p) + ".");
  }
}

void swap_blocks(py::handle source, py::handle target, py::handle block_mapping, const std::string& rung_name,
                 const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("source", source);
  args.define("2", 2);
  const TensorView pairs = args.tensor("block_mapping", block_mapping, kInt64, kContiguous, {"P", "2"});
  args.allow_host_memory();
  const TensorView from = args.tensor("source", source, dtype, kContiguous, {"Ns", "B", "Hkv", "D"});
  const TensorView to = args.tensor("target", target, dtype, kContiguous, {"Nt", "B", "Hkv", "D"});
  check_reachable(from);
  check_reachable(to);
  check_swaps(pairs.data<const int64_t>(), args["P"], args);
  if (from.data<void>() == to.data<void>()) reject("target: expected other memory than the source's; use copy_blocks.");
  const int rung = device::rung_number("swap_blocks", rung_name);
  const int count = as_int("block_mapping", args["P"]);
  const int block_elements = as_int("source", args["B"] * args["Hkv"] * args["D"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::swap_blocks<T>({from.data<const T>(), to.data<T>(), pairs.data<const int64_t>(), count, block_elements},
                           rung, stream);
  });
}

struct Visible {
  int most;                       // positions that any query sees
};

// What the kernels rely on to stay inside the cache.
Visible check_decode(const int32_t* tables, int64_t table_stride, const int32_t* lens, const Arguments& args,
                     int64_t window) {
  const int64_t block_size = args["B"], room = args["max_blocks"] * block_size;
  // Unread, a sequence may be as long as its table.
  if (!kReadsIndices) return {as_int("block_tables", window > 0 ? std::min(window, room) : room)};
  Visible visible{0};
  for (int64_t s = 0; s < args["S"]; ++s) {
    const int64_t length = lens[s];
    const std::string of = " of sequence " + std::to_string(s);
    if (length < 0 || length > room) {
      reject("seq_lens: expected between 0 and " + std::to_string(room) + " (max_blocks * B)" + of + ", got " +
             std::to_string(length) + ".");
    }
    const int64_t begin = window > 0 ? std::max<int64_t>(0, length - window) : 0;
    visible.most = std::max(visible.most, static_cast<int>(length - begin));
    for (int64_t i = begin / block_size; i * block_size < length; ++i) {
      check_block(tables[s * table_stride + i], i, of, args);
    }
  }
  return visible;
}

void check_heads(const Arguments& args) {
  if (args["Hkv"] < 1 || args["H"] < 1 || args["H"] % args["Hkv"] != 0) {
    reject("query: expected a multiple of Hkv=" + std::to_string(args["Hkv"]) + " heads, got " +
           std::to_string(args["H"]) + ".");
  }
  if (args["D"] < 1 || args["D"] > kLargestHeadDim || args["B"] < 1) {
    reject("k_cache: expected B of at least 1 and D between 1 and " + std::to_string(kLargestHeadDim) + ", got B=" +
           std::to_string(args["B"]) + " and D=" + std::to_string(args["D"]) + ".");
  }
  if (args["S"] > 65535) {
    reject("seq_lens: expected at most 65535 sequences, the limit of a grid's other dimensions, got " +
           std::to_string(args["S"]) + ".");
  }
}

void paged_attention(py::handle out, py::handle query, py::handle k_cache, py::handle v_cache,
                     py::handle block_tables, py::handle seq_lens, double scale, int64_t window,
                     const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("query", query);
  const TensorView q = args.tensor("query", query, dtype, kRows, {"S", "H", "D"});
  const TensorView o = args.tensor("out", out, dtype, kRows, {"S", "H", "D"});
  const TensorView kc = args.tensor("k_cache", k_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView vc = args.tensor("v_cache", v_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView tables = args.tensor("block_tables", block_tables, kInt32, kRows, {"S", "max_blocks"});
  const TensorView lens = args.tensor("seq_lens", seq_lens, kInt32, kContiguous, {"S"});
  check_heads(args);
  if (window < 0) reject("window: expected at least 0 (off), got " + std::to_string(window) + ".");
  const Visible visible =
      check_decode(tables.data<const int32_t>(), row_stride(tables), lens.data<const int32_t>(), args, window);
  const int rung = device::rung_number("paged_attention", rung_name);
  const int splits = device::num_splits(visible.most);
  const int64_t rows = args["S"] * args["H"] * splits;
  // A mean of V, a largest logit and a sum for each split.
  const Workspace workspace(query, rows * (args["D"] + 2));
  float* means = workspace.floats();
  float* largest = means + rows * args["D"];
  const int window_in_range = static_cast<int>(std::min<int64_t>(window, std::numeric_limits<int>::max()));
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::paged_attention<T>(
        {o.data<T>(), q.data<const T>(), kc.data<const T>(), vc.data<const T>(), tables.data<const int32_t>(),
         lens.data<const int32_t>(), row_stride(o), row_stride(q), row_stride(tables), as_int("query", args["S"]),
         as_int("query", args["H"]), as_int("k_cache", args["Hkv"]), as_int("query", args["D"]),
         as_int("k_cache", args["B"]), window_in_range, static_cast<float>(scale), means, largest,
         largest + rows, splits},
        visible.most, rung, stream);
  });
}

// What the kernels rely on to stay inside the cache and the query. Returns the most rows of any sequence.
int64_t check_chunks(const int32_t* starts, const int32_t* lens, const int32_t* tables, int64_t table_stride,
                     const Arguments& args, int64_t window) {
  if (!kReadsIndices) return args["T"];  // unread, all may be of one sequence
  const int64_t num_seqs = args["S"], block_size = args["B"], room = args["max_blocks"] * block_size;
  if (starts[0] != 0 || starts[num_seqs] != args["T"]) {
    reject("query_start_loc: expected to start at 0 and end at T=" + std::to_string(args["T"]) + ", got " +
           std::to_string(starts[0]) + " and " + std::to_string(starts[num_seqs]) + ".");
  }
  int64_t most = 0;
  for (int64_t s = 0; s < num_seqs; ++s) {
    const std::string of = " of sequence " + std::to_string(s);
    const int64_t rows = int64_t{starts[s + 1]} - starts[s], length = lens[s];
    if (rows < 0) reject("query_start_loc: expected ascending values, got " + std::to_string(rows) + " rows" + of + ".");
    if (length < rows || length > room) {
      reject("seq_lens: expected between " + std::to_string(rows) + " (the query rows) and " + std::to_string(room) +
             " (max_blocks * B)" + of + ", got " + std::to_string(length) + ".");
    }
    if (rows == 0) continue;
    const int64_t first_seen = window > 0 ? std::max<int64_t>(0, length - rows + 1 - window) : 0;
    for (int64_t i = first_seen / block_size; i * block_size < length; ++i) {
      check_block(tables[s * table_stride + i], i, of, args);
    }
    most = std::max(most, rows);
  }
  return most;
}

void prefill_attention(py::handle out, py::handle query, py::handle k_cache, py::handle v_cache,
                       py::handle block_tables, py::handle query_start_loc, py::handle seq_lens, double scale,
                       int64_t window, const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("query", query);
  const TensorView q = args.tensor("query", query, dtype, kRows, {"T", "H", "D"});
  const TensorView o = args.tensor("out", out, dtype, kRows, {"T", "H", "D"});
  const TensorView kc = args.tensor("k_cache", k_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView vc = args.tensor("v_cache", v_cache, dtype, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView tables = args.tensor("block_tables", block_tables, kInt32, kRows, {"S", "max_blocks"});
  args.define("S+1", args["S"] + 1);
  const TensorView starts = args.tensor("query_start_loc", query_start_loc, kInt32, kContiguous, {"S+1"});
  const TensorView lens = args.tensor("seq_lens", seq_lens, kInt32, kContiguous, {"S"});
  check_heads(args);
  if (window < 0) reject("window: expected at least 0 (off), got " + std::to_string(window) + ".");
  const int64_t most = check_chunks(starts.data<const int32_t>(), lens.data<const int32_t>(),
                                    tables.data<const int32_t>(), row_stride(tables), args, window);
  const int rung = device::rung_number("prefill_attention", rung_name);
  const int window_in_range = static_cast<int>(std::min<int64_t>(window, std::numeric_limits<int>::max()));
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::prefill_attention<T>(
        {o.data<T>(), q.data<const T>(), kc.data<const T>(), vc.data<const T>(), tables.data<const int32_t>(),
         starts.data<const int32_t>(), lens.data<const int32_t>(), row_stride(o), row_stride(q), row_stride(tables),
         as_int("query", args["T"]), as_int("query_start_loc", args["S"]), as_int("query", args["H"]),
         as_int("k_cache", args["Hkv"]), as_int("query", args["D"]), as_int("k_cache", args["B"]), window_in_range,
         static_cast<float>(scale)},
        as_int("query", most), rung, stream);
  });
}

void silu_and_mul(py::handle out, py::handle gate_up, const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("out", out);
  const TensorView o = args.tensor("out", out, dtype, kRows, {"T", "F"});
  args.define("2F", 2 * args["F"]);
  const TensorView in = args.tensor("gate_up", gate_up, dtype, kRows, {"T", "2F"});
  const int rung = device::rung_number("silu_mul", rung_name);
  const int tokens = as_int("out", args["T"]), ffn = as_int("out", args["F"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::silu_mul<T>({o.data<T>(), in.data<const T>(), row_stride(o), row_stride(in), tokens, ffn}, rung, stream);
  });
}

void gelu(py::handle out, py::handle x, const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("x", x);
  const TensorView in = args.tensor("x", x, dtype, kRows, {"T", "F"});
  const TensorView o = args.tensor("out", out, dtype, kRows, {"T", "F"});
  const int rung = device::rung_number("gelu", rung_name);
  const int tokens = as_int("x", args["T"]), ffn = as_int("x", args["F"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::gelu<T>({o.data<T>(), in.data<const T>(), row_stride(o), row_stride(in), tokens, ffn}, rung, stream);
  });
}

void rotary_embedding(py::handle positions, py::handle query, py::handle key, py::handle cos_sin_cache,
                      const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("query", query);
  const TensorView pos = args.tensor("positions", positions, kInt64, kContiguous, {"T"});
  const TensorView q = args.tensor("query", query, dtype, kRows, {"T", "H", "D"});
  const TensorView k = args.tensor("key", key, dtype, kRows, {"T", "Hkv", "D"});
  const TensorView cache = args.tensor("cos_sin_cache", cos_sin_cache, kFloat32, kContiguous, {"max_pos", "D"});
  if (args["D"] % 2 != 0 || args["D"] > kLargestHeadDim) {
    reject("query: expected an even head dim D of at most " + std::to_string(kLargestHeadDim) + ", got shape " +
           q.shape_text() + ".");
  }
  if (kReadsIndices) {
    check_range("positions", pos.data<const int64_t>(), args["T"], 0, args["max_pos"], "(rows of cos_sin_cache)");
  }
  const int rung = device::rung_number("rotary", rung_name);
  const int tokens = as_int("query", args["T"]), heads = as_int("query", args["H"]);
  const int kv_heads = as_int("key", args["Hkv"]), head_dim = as_int("query", args["D"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::rotary<T>({pos.data<const int64_t>(), q.data<T>(), k.data<T>(), cache.data<const float>(), row_stride(q),
                       row_stride(k), tokens, heads, kv_heads, head_dim},
                      rung, stream);
  });
}

void softmax(py::handle out, py::handle x, const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("x", x);
  const TensorView in = args.tensor("x", x, dtype, kRows, {"R", "V"});
  const TensorView o = args.tensor("out", out, dtype, kRows, {"R", "V"});
  const int rung = device::rung_number("softmax", rung_name);
  const int rows = as_int("x", args["R"]), row_size = as_int("x", args["V"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::softmax<T>({o.data<T>(), in.data<const T>(), row_stride(o), row_stride(in), rows, row_size}, rung, stream);
  });
}

void argmax(py::handle out, py::handle x, const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("x", x);
  const TensorView in = args.tensor("x", x, dtype, kRows, {"R", "V"});
  const TensorView ids = args.tensor("out", out, kInt64, kContiguous, {"R"});
  if (args["V"] < 1) reject("x: expected a vocabulary V of at least 1, got shape " + in.shape_text() + ".");
  const int rung = device::rung_number("argmax", rung_name);
  const int rows = as_int("x", args["R"]), row_size = as_int("x", args["V"]);
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) {
    using T = decltype(zero);
    device::argmax<T>({ids.data<int64_t>(), in.data<const T>(), row_stride(in), rows, row_size}, rung, stream);
  });
}

// The cheapest launch there is, and a wait for it: throws where kernels cannot run here.
void probe() {
  device::probe(nullptr);
  device::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}

py::dict rungs() {
  py::dict all;
  for (const device::Ladder& ladder : device::ladders()) {
    py::list names;
    for (const device::Rung& rung : ladder.rungs) names.append(rung.name);
    all[py::str(ladder.operation)] = py::tuple(names);
  }
  return all;
}

py::dict claims() {
  py::dict all;
  for (const device::Ladder& ladder : device::ladders()) {
    py::list figures;
    for (const device::Rung& rung : ladder.rungs) figures.append(rung.improves);
    all[py::str(ladder.operation)] = py::tuple(figures);
  }
  return all;
}

}  // namespace

// In fast._simt or fast._cuda and, for traced kernels, in fast._simt_trace.
void bind_kernels(py::module_& m) {
  using arg = pybind11::arg;
  bind_launch(m);
  bind_sampling(m);
  m.def("probe", &twinfer::probe);
  m.def("rungs", &twinfer::rungs);
  m.def("claims", &twinfer::claims);
  m.def("rms_norm", &twinfer::rms_norm, arg("out"), arg("x"), arg("weight"), arg("eps"), arg("rung"),
        arg("launch"));
  m.def("fused_add_rms_norm", &twinfer::fused_add_rms_norm, arg("x"), arg("residual"), arg("weight"), arg("eps"),
        arg("rung"), arg("launch"));
  m.def("layer_norm", &twinfer::layer_norm, arg("out"), arg("x"), arg("weight"), arg("bias"), arg("eps"), arg("rung"),
        arg("launch"));
  m.def("reshape_and_cache", &twinfer::reshape_and_cache, arg("key"), arg("value"), arg("k_cache"), arg("v_cache"),
        arg("slot_mapping"), arg("rung"), arg("launch"));
  m.def("copy_blocks", &twinfer::copy_blocks, arg("k_cache"), arg("v_cache"), arg("block_mapping"), arg("rung"),
        arg("launch"));
  m.def("swap_blocks", &twinfer::swap_blocks, arg("source"), arg("target"), arg("block_mapping"), arg("rung"),
        arg("launch"));
  m.def("paged_attention", &twinfer::paged_attention, arg("out"), arg("query"), arg("k_cache"), arg("v_cache"),
        arg("block_tables"), arg("seq_lens"), arg("scale"), arg("window"), arg("rung"), arg("launch"));
  m.def("prefill_attention", &twinfer::prefill_attention, arg("out"), arg("query"), arg("k_cache"), arg("v_cache"),
        arg("block_tables"), arg("query_start_loc"), arg("seq_lens"), arg("scale"), arg("window"), arg("rung"),
        arg("launch"));
  m.def("silu_and_mul", &twinfer::silu_and_mul, arg("out"), arg("gate_up"), arg("rung"), arg("launch"));
  m.def("gelu", &twinfer::gelu, arg("out"), arg("x"), arg("rung"), arg("launch"));
  m.def("rotary_embedding", &twinfer::rotary_embedding, arg("positions"), arg("query"), arg("key"),
        arg("cos_sin_cache"), arg("rung"), arg("launch"));
  m.def("softmax", &twinfer::softmax, arg("out"), arg("x"), arg("rung"), arg("launch"));
  m.def("argmax", &twinfer::argmax, arg("out"), arg("x"), arg("rung"), arg("launch"));
}

}  // namespace twinfer

#if defined(TWINFER_CUDA)
PYBIND11_MODULE(_cuda, m) {
#else
PYBIND11_MODULE(_simt, m) {
#endif
  m.doc() = "The kernels of csrc/kernels; fast/ladder.py documents them.";
  twinfer::bind_kernels(m);
}

// The module fast._cpu. Every argument is checked here, before a kernel sees it; nothing is written when a check
// fails. The GIL is released while a kernel runs. std::invalid_argument arrives in Python as ValueError.
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "arguments.h"
#include "cpu/philox.h"
#include "cpu/plan.h"
#include "cpu/probe.h"
#include "sampling_checks.h"

namespace twinfer {
namespace {

constexpr Layout kContiguous = Layout::kContiguous;
constexpr Layout kRows = Layout::kRows;

// The plan that this thread records, if it records one.
thread_local cpu::Plan* recorded_plan = nullptr;

cpu::StepSize tokens_of(const Arguments& args) { return {args["T"], 0}; }

cpu::Check values_in_range(const char* name, const int32_t* values, int64_t high, const char* hint) {
  return {{reinterpret_cast<int64_t>(values), high}, [=](const cpu::StepSize& step) {
            check_range(name, values, step.num_tokens, 0, high, hint);
          }};
}

cpu::Check values_in_range(const char* name, const int64_t* values, int64_t high, const char* hint) {
  return {{reinterpret_cast<int64_t>(values), high}, [=](const cpu::StepSize& step) {
            check_range(name, values, step.num_tokens, 0, high, hint);
          }};
}

// Makes a call whose shapes have been checked, or records it for the step that a plan replays. `checks` are about
// numbers in its tensors, which a step may change.
template <class Call, class Kernel>
void launch_or_record(const Call& call, const Kernel& kernel, const cpu::StepSize& size, int threads,
                      const std::vector<cpu::Check>& checks) {
  check_threads(threads);
  if (recorded_plan != nullptr) return recorded_plan->record(call, kernel, size, checks);
  const py::gil_scoped_release released;
  for (const cpu::Check& check : checks) check.run(size);
  kernel(call, threads);
}

template <class Call>
void launch(void (*kernel)(const Call&, cpu::Isa, int), const Call& call, const cpu::StepSize& size, int threads,
            const std::vector<cpu::Check>& checks = {}) {
  const auto run = [kernel](const Call& sized, int team) { kernel(sized, cpu::active_isa(), team); };
  launch_or_record(call, run, size, threads, checks);
}

template <class Call>
void launch(void (*kernel)(const Call&, int), const Call& call, const cpu::StepSize& size, int threads,
            const std::vector<cpu::Check>& checks = {}) {
  launch_or_record(call, kernel, size, threads, checks);
}

// For what works on the rows that are sampled and not on those of the step.
void refuse_to_record(const char* kernel) {
  if (recorded_plan != nullptr) reject(std::string(kernel) + ": it is no part of a plan, call it after the replay.");
}

void reshape_and_cache(py::handle key, py::handle value, py::handle k_cache, py::handle v_cache,
                       py::handle slot_mapping, int threads) {
  Arguments args;
  const TensorView k = args.tensor("key", key, kFloat32, kRows, {"T", "Hkv", "D"});
  const TensorView v = args.tensor("value", value, kFloat32, kRows, {"T", "Hkv", "D"});
  const TensorView kc = args.tensor("k_cache", k_cache, kFloat32, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView vc = args.tensor("v_cache", v_cache, kFloat32, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView slots = args.tensor("slot_mapping", slot_mapping, kInt64, kContiguous, {"T"});
  const int64_t num_slots = args["N"] * args["B"];
  launch(cpu::reshape_and_cache,
         {rows_of<const float>(k), rows_of<const float>(v), kc.data<float>(), vc.data<float>(),
          slots.data<const int64_t>(), args["T"], args["Hkv"] * args["D"]},
         tokens_of(args), threads,
         {values_in_range("slot_mapping", slots.data<const int64_t>(), num_slots, "(N * B slots)")});
}

void swap_blocks(py::handle source, py::handle target, py::handle block_mapping, int threads) {
  Arguments args;
  const TensorView from = args.tensor("source", source, kFloat32, kContiguous, {"Ns", "B", "Hkv", "D"});
  const TensorView to = args.tensor("target", target, kFloat32, kContiguous, {"Nt", "B", "Hkv", "D"});
  args.define("2", 2);
  const TensorView pairs = args.tensor("block_mapping", block_mapping, kInt64, kContiguous, {"P", "2"});
  check_threads(threads);
  refuse_to_record("swap_blocks");
  const py::gil_scoped_release released;
  const auto* blocks = pairs.data<const int64_t>();
  for (int64_t i = 0; i < 2 * args["P"]; ++i) {
    const int64_t limit = args[i % 2 == 0 ? "Ns" : "Nt"];
    if (blocks[i] >= 0 && blocks[i] < limit) continue;
    reject("block_mapping: expected blocks in [0, " + std::to_string(limit) + "), got " + std::to_string(blocks[i]) +
           " in pair " + std::to_string(i / 2) + ".");
  }
  cpu::swap_blocks({from.data<const float>(), to.data<float>(), blocks, args["P"],
                    args["B"] * args["Hkv"] * args["D"]},
                   threads);
}

// What the kernel relies on to stay inside its tensors.
void check_attention(const cpu::PagedAttention& a, int64_t num_tokens, int64_t max_blocks, int64_t num_blocks) {
  if (a.query_start_loc[0] != 0 || a.query_start_loc[a.num_seqs] != num_tokens) {
    reject("query_start_loc: expected to start at 0 and end at T=" + std::to_string(num_tokens) + ", got " +
           std::to_string(a.query_start_loc[0]) + " and " + std::to_string(a.query_start_loc[a.num_seqs]) + ".");
  }
  for (int64_t s = 0; s < a.num_seqs; ++s) {
    const auto which = [s] { return " of sequence " + std::to_string(s); };  // only a refusal needs it
    const int64_t rows = int64_t{a.query_start_loc[s + 1]} - a.query_start_loc[s];
    if (rows < 0) {
      reject("query_start_loc: expected ascending values, got " + std::to_string(rows) + " rows" + which() + ".");
    }
    const int64_t length = a.seq_lens[s], room = max_blocks * a.block_size;
    if (length < rows || length > room) {
      reject("seq_lens: expected between " + std::to_string(rows) + " (the query rows) and " + std::to_string(room) +
             " (max_blocks * B)" + which() + ", got " + std::to_string(length) + ".");
    }
    if (rows == 0) continue;
    const int64_t used = (length + a.block_size - 1) / a.block_size;
    const int64_t first_seen = std::max<int64_t>(0, length - rows + 1 - a.sliding_window);
    for (int64_t i = first_seen / a.block_size; i < used; ++i) {
      const int32_t block = a.block_tables[s][i];
      if (block >= 0 && block < num_blocks) continue;
      reject("block_tables: expected blocks in [0, " + std::to_string(num_blocks) + "), got " +
             std::to_string(block) + " at entry " + std::to_string(i) + which() + ".");
    }
  }
}

void paged_attention(py::handle out, py::handle query, py::handle k_cache, py::handle v_cache,
                     py::handle block_tables, py::handle query_start_loc, py::handle seq_lens, double scale,
                     std::optional<int64_t> sliding_window, int threads) {
  Arguments args;
  const TensorView q = args.tensor("query", query, kFloat32, kRows, {"T", "H", "D"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "H", "D"});
  const TensorView kc = args.tensor("k_cache", k_cache, kFloat32, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView vc = args.tensor("v_cache", v_cache, kFloat32, kContiguous, {"N", "B", "Hkv", "D"});
  const TensorView tables = args.tensor("block_tables", block_tables, kInt32, kRows, {"S", "max_blocks"});
  args.define("S+1", args["S"] + 1);
  const TensorView starts = args.tensor("query_start_loc", query_start_loc, kInt32, kContiguous, {"S+1"});
  const TensorView lens = args.tensor("seq_lens", seq_lens, kInt32, kContiguous, {"S"});
  const int64_t heads = args["H"], kv_heads = args["Hkv"], head_dim = args["D"], block_size = args["B"];
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0) {
    reject("query: expected a multiple of Hkv=" + std::to_string(kv_heads) + " heads, got " +
           std::to_string(heads) + ".");
  }
  if (sliding_window && *sliding_window < 1) {
    reject("sliding_window: expected at least 1 (the token itself), or None, got " +
           std::to_string(*sliding_window) + ".");
  }
  if (head_dim < 1 || block_size < 1) {
    reject("k_cache: expected B and D of at least 1, got shape " + kc.shape_text() + ".");
  }
  const cpu::PagedAttention call{rows_of<float>(o), rows_of<const float>(q), kc.data<const float>(),
                                 vc.data<const float>(), rows_of<const int32_t>(tables),
                                 starts.data<const int32_t>(), lens.data<const int32_t>(), args["S"],
                                 static_cast<int>(heads), static_cast<int>(kv_heads), static_cast<int>(head_dim),
                                 static_cast<int>(block_size), std::min(sliding_window.value_or(cpu::kNoWindow), cpu::kNoWindow),
                                 static_cast<float>(scale)};
  const int64_t max_blocks = args["max_blocks"], num_blocks = args["N"];
  const cpu::Check metadata{
      {reinterpret_cast<int64_t>(call.query_start_loc), reinterpret_cast<int64_t>(call.seq_lens),
       reinterpret_cast<int64_t>(call.block_tables.data), block_size, num_blocks, call.sliding_window},
      [=](const cpu::StepSize& step) {
        cpu::PagedAttention sized = call;
        cpu::resize(sized, step);
        check_attention(sized, step.num_tokens, max_blocks, num_blocks);
      }};
  launch(cpu::paged_attention, call, {args["T"], args["S"]}, threads, {metadata});
}

const cpu::WeightFormat& find_format(const std::string& name) {
  std::string known;
  for (const cpu::WeightFormat& format : cpu::kWeightFormats) {
    if (name == format.name) return format;
    known += (known.empty() ? "" : ", ") + std::string(format.name);
  }
  reject("parts: expected a type among " + known + ", got " + name + ".");
}

std::unique_ptr<cpu::PackedMatrix> pack(const py::list& parts, int64_t in_features, int threads) {
  check_threads(threads);
  if (in_features < 1) reject("in_features: expected at least 1, got " + std::to_string(in_features) + ".");
  if (parts.empty()) reject("parts: expected at least one, got none.");
  std::vector<TensorView> views;  // keep the rows alive
  std::vector<cpu::PackedMatrix::Part> checked;
  for (const py::handle part : parts) {
    const auto [type, rows] = part.cast<std::pair<std::string, py::object>>();
    const cpu::WeightFormat& format = find_format(type);
    if (in_features % format.block_depth != 0) {
      reject("in_features: expected a multiple of " + std::to_string(format.block_depth) + " for " + type + ", got " +
             std::to_string(in_features) + ".");
    }
    Arguments args;
    args.define("row_bytes", in_features / format.block_depth * format.block_bytes);
    views.push_back(args.tensor("rows", rows, kUint8, kRows, {"F", "row_bytes"}));
    if (args["F"] < 1) reject("rows: expected at least one row, got shape " + views.back().shape_text() + ".");
    checked.push_back({static_cast<cpu::WeightType>(&format - cpu::kWeightFormats),
                       views.back().data<const uint8_t>(), views.back().stride(0), args["F"]});
  }
  const py::gil_scoped_release released;
  return std::make_unique<cpu::PackedMatrix>(checked, in_features, cpu::tile_columns(cpu::active_isa()), threads);
}

void linear(py::handle out, py::handle x, const cpu::PackedMatrix& weight, py::handle bias, int threads) {
  Arguments args;
  args.define("C", weight.in_features());
  args.define("F", weight.out_features());
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "F"});
  const float* b = nullptr;
  if (!bias.is_none()) b = args.tensor("bias", bias, kFloat32, kContiguous, {"F"}).data<const float>();
  launch(cpu::linear, {rows_of<float>(o), rows_of<const float>(in), &weight, b, args["T"]}, tokens_of(args), threads);
}

void linear_silu_and_mul(py::handle out, py::handle x, const cpu::PackedMatrix& weight, py::handle bias, int threads) {
  Arguments args;
  args.define("C", weight.in_features());
  args.define("2F", weight.out_features());
  args.define("F", weight.out_features() / 2);
  if (!cpu::has_equal_halves(weight)) {
    reject("weight: expected two parts of equal size, the gate's rows and those of up, packed as parts of their own.");
  }
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "F"});
  const float* b = nullptr;
  if (!bias.is_none()) b = args.tensor("bias", bias, kFloat32, kContiguous, {"2F"}).data<const float>();
  launch(cpu::linear_silu_and_mul, {rows_of<float>(o), rows_of<const float>(in), &weight, b, args["T"]},
         tokens_of(args), threads);
}

void linear_argmax(py::handle out, py::handle x, const cpu::PackedMatrix& weight, int threads) {
  Arguments args;
  args.define("C", weight.in_features());
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView columns = args.tensor("out", out, kInt64, kContiguous, {"T"});
  launch(cpu::linear_argmax, {columns.data<int64_t>(), rows_of<const float>(in), &weight, args["T"]}, tokens_of(args),
         threads);
}

void embedding(py::handle out, py::handle ids, const cpu::PackedMatrix& weight, int threads) {
  Arguments args;
  args.define("C", weight.in_features());
  const TensorView rows = args.tensor("ids", ids, kInt32, kContiguous, {"T"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "C"});
  launch(cpu::embedding, {rows_of<float>(o), rows.data<const int32_t>(), &weight, args["T"]}, tokens_of(args), threads,
         {values_in_range("ids", rows.data<const int32_t>(), weight.out_features(), "(rows of the weight)")});
}

void position_embedding(py::handle out, py::handle positions, py::handle table, int threads) {
  Arguments args;
  const TensorView pos = args.tensor("positions", positions, kInt64, kContiguous, {"T"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "C"});
  const TensorView rows = args.tensor("table", table, kFloat32, kContiguous, {"P", "C"});
  launch(cpu::position_embedding,
         {rows_of<float>(o), pos.data<const int64_t>(), rows.data<const float>(), args["T"], args["C"]},
         tokens_of(args), threads,
         {values_in_range("positions", pos.data<const int64_t>(), args["P"], "(rows of the table)")});
}

void rms_norm(py::handle out, py::handle x, py::handle weight, double eps, int threads) {
  Arguments args;
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "C"});
  const TensorView w = args.tensor("weight", weight, kFloat32, kContiguous, {"C"});
  launch(cpu::rms_norm,
         {rows_of<float>(o), rows_of<const float>(in), w.data<const float>(), args["T"], args["C"],
          static_cast<float>(eps)},
         tokens_of(args), threads);
}

void head_rms_norm(py::handle x, py::handle weight, double eps, int threads) {
  Arguments args;
  const TensorView heads = args.tensor("x", x, kFloat32, kRows, {"T", "H", "D"});
  const TensorView w = args.tensor("weight", weight, kFloat32, kContiguous, {"D"});
  launch(cpu::head_rms_norm,
         {rows_of<float>(heads), w.data<const float>(), args["T"], args["H"], args["D"],
          static_cast<float>(eps)},
         tokens_of(args), threads);
}

void fused_add_rms_norm(py::handle x, py::handle residual, py::handle weight, double eps, int threads) {
  Arguments args;
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView res = args.tensor("residual", residual, kFloat32, kRows, {"T", "C"});
  const TensorView w = args.tensor("weight", weight, kFloat32, kContiguous, {"C"});
  launch(cpu::fused_add_rms_norm,
         {rows_of<float>(in), rows_of<float>(res), w.data<const float>(), args["T"], args["C"],
          static_cast<float>(eps)},
         tokens_of(args), threads);
}

void layer_norm(py::handle out, py::handle x, py::handle weight, py::handle bias, double eps, int threads) {
  Arguments args;
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "C"});
  const TensorView w = args.tensor("weight", weight, kFloat32, kContiguous, {"C"});
  const TensorView b = args.tensor("bias", bias, kFloat32, kContiguous, {"C"});
  launch(cpu::layer_norm,
         {rows_of<float>(o), rows_of<const float>(in), w.data<const float>(), b.data<const float>(), args["T"],
          args["C"], static_cast<float>(eps)},
         tokens_of(args), threads);
}

void fused_add_layer_norm(py::handle x, py::handle residual, py::handle weight, py::handle bias, double eps,
                          int threads) {
  Arguments args;
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "C"});
  const TensorView res = args.tensor("residual", residual, kFloat32, kRows, {"T", "C"});
  const TensorView w = args.tensor("weight", weight, kFloat32, kContiguous, {"C"});
  const TensorView b = args.tensor("bias", bias, kFloat32, kContiguous, {"C"});
  launch(cpu::fused_add_layer_norm,
         {rows_of<float>(in), rows_of<float>(res), w.data<const float>(), b.data<const float>(), args["T"],
          args["C"], static_cast<float>(eps)},
         tokens_of(args), threads);
}

void rotary_embedding(py::handle positions, py::handle query, py::handle key, py::handle cos_sin_cache, int threads) {
  Arguments args;
  const TensorView pos = args.tensor("positions", positions, kInt64, kContiguous, {"T"});
  const TensorView q = args.tensor("query", query, kFloat32, kRows, {"T", "H", "D"});
  const TensorView k = args.tensor("key", key, kFloat32, kRows, {"T", "Hkv", "D"});
  const TensorView cache = args.tensor("cos_sin_cache", cos_sin_cache, kFloat32, kContiguous, {"max_pos", "D"});
  if (args["D"] % 2 != 0) {
    reject("query: expected an even head dim D, got shape " + q.shape_text() + ".");
  }
  launch(cpu::rotary_embedding,
         {pos.data<const int64_t>(), rows_of<float>(q), rows_of<float>(k), cache.data<const float>(), args["T"],
          static_cast<int>(args["H"]), static_cast<int>(args["Hkv"]), static_cast<int>(args["D"])},
         tokens_of(args), threads,
         {values_in_range("positions", pos.data<const int64_t>(), args["max_pos"], "(rows of cos_sin_cache)")});
}

void silu_and_mul(py::handle out, py::handle gate_up, int threads) {
  Arguments args;
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "F"});
  args.define("2F", 2 * args["F"]);
  const TensorView in = args.tensor("gate_up", gate_up, kFloat32, kRows, {"T", "2F"});
  launch(cpu::silu_and_mul, {rows_of<float>(o), rows_of<const float>(in), args["T"], args["F"]},
         tokens_of(args), threads);
}

void gelu(py::handle out, py::handle x, int threads) {
  Arguments args;
  const TensorView in = args.tensor("x", x, kFloat32, kRows, {"T", "F"});
  const TensorView o = args.tensor("out", out, kFloat32, kRows, {"T", "F"});
  launch(cpu::gelu, {rows_of<float>(o), rows_of<const float>(in), args["T"], args["F"]}, tokens_of(args), threads);
}

void apply_token_bitmask(py::handle logits, py::handle rows, py::handle bitmasks, int threads) {
  refuse_to_record("apply_token_bitmask");
  Arguments args;
  const TensorView values = args.tensor("logits", logits, kFloat32, kRows, {"R", "V"});
  const TensorView masked = args.tensor("rows", rows, kInt64, kContiguous, {"P"});
  args.define("cdiv(V, 32)", (args["V"] + 31) / 32);
  const TensorView bits = args.tensor("bitmasks", bitmasks, kInt32, kContiguous, {"P", "cdiv(V, 32)"});
  check_threads(threads);
  check_vocabulary(values, args["V"]);
  const py::gil_scoped_release released;
  const cpu::TokenBitmask call{rows_of<float>(values), masked.data<const int64_t>(), bits.data<const int32_t>(),
                               args["P"], args["V"]};
  check_ascending_rows(call.rows, call.num_masked, args["R"]);
  cpu::apply_token_bitmask(call, cpu::active_isa(), threads);
}

void process_logits(py::handle logits, py::handle rows, py::handle allowed_starts, py::handle allowed_ids,
                    py::handle masked_starts, py::handle masked_ids, py::handle biased_starts, py::handle biased_ids,
                    py::handle biases, py::handle seen_starts, py::handle seen_ids, py::handle counts,
                    py::handle repetition_penalty, py::handle presence_penalty, py::handle frequency_penalty,
                    int threads) {
  refuse_to_record("process_logits");
  Arguments args;
  const TensorView values = args.tensor("logits", logits, kFloat32, kRows, {"R", "V"});
  const TensorView processed = args.tensor("rows", rows, kInt64, kContiguous, {"P"});
  args.define("P + 1", args["P"] + 1);
  const auto lists = [&](const char* starts_name, py::handle starts, const char* ids_name, py::handle ids,
                         const char* count) {
    const TensorView offsets = args.tensor(starts_name, starts, kInt64, kContiguous, {"P + 1"});
    const TensorView tokens = args.tensor(ids_name, ids, kInt32, kContiguous, {count});
    return cpu::IdLists{offsets.data<const int64_t>(), tokens.data<const int32_t>()};
  };
  const cpu::IdLists allowed = lists("allowed_starts", allowed_starts, "allowed_ids", allowed_ids, "allowed");
  const cpu::IdLists masked = lists("masked_starts", masked_starts, "masked_ids", masked_ids, "masked");
  const cpu::IdLists biased = lists("biased_starts", biased_starts, "biased_ids", biased_ids, "biased");
  const TensorView bias = args.tensor("biases", biases, kFloat64, kContiguous, {"biased"});
  const cpu::IdLists seen = lists("seen_starts", seen_starts, "seen_ids", seen_ids, "seen");
  const TensorView times = args.tensor("counts", counts, kInt32, kContiguous, {"seen"});
  const TensorView repetition = args.tensor("repetition_penalty", repetition_penalty, kFloat64, kContiguous, {"P"});
  const TensorView presence = args.tensor("presence_penalty", presence_penalty, kFloat64, kContiguous, {"P"});
  const TensorView frequency = args.tensor("frequency_penalty", frequency_penalty, kFloat64, kContiguous, {"P"});
  check_threads(threads);
  check_vocabulary(values, args["V"]);
  const py::gil_scoped_release released;
  const int64_t num_lists = args["P"], vocab_size = args["V"];
  check_id_lists("allowed_starts", "allowed_ids", allowed, num_lists, args["allowed"], vocab_size);
  check_id_lists("masked_starts", "masked_ids", masked, num_lists, args["masked"], vocab_size);
  check_id_lists("biased_starts", "biased_ids", biased, num_lists, args["biased"], vocab_size);
  check_id_lists("seen_starts", "seen_ids", seen, num_lists, args["seen"], vocab_size);
  const cpu::ProcessLogits call{rows_of<float>(values), processed.data<const int64_t>(), allowed, masked, biased,
                                bias.data<const double>(), seen, times.data<const int32_t>(),
                                repetition.data<const double>(), presence.data<const double>(),
                                frequency.data<const double>(), num_lists, vocab_size};
  check_processing(call, args["R"]);
  cpu::process_logits(call, cpu::active_isa(), threads);
}

void sample(py::handle logits, py::handle temperature, py::handle top_k, py::handle top_p, py::handle min_p,
            py::handle seeds, py::handle output_positions, py::handle out, int threads) {
  refuse_to_record("sample");
  Arguments args;
  const TensorView rows = args.tensor("logits", logits, kFloat32, kRows, {"R", "V"});
  const TensorView temperatures = args.tensor("temperature", temperature, kFloat64, kContiguous, {"R"});
  const TensorView ks = args.tensor("top_k", top_k, kInt32, kContiguous, {"R"});
  const TensorView ps = args.tensor("top_p", top_p, kFloat64, kContiguous, {"R"});
  const TensorView min_ps = args.tensor("min_p", min_p, kFloat64, kContiguous, {"R"});
  const TensorView seed_bits = args.tensor("seeds", seeds, kInt64, kContiguous, {"R"});
  const TensorView positions = args.tensor("output_positions", output_positions, kInt64, kContiguous, {"R"});
  const TensorView ids = args.tensor("out", out, kInt64, kContiguous, {"R"});
  check_threads(threads);
  check_vocabulary(rows, args["V"]);
  const py::gil_scoped_release released;
  const cpu::Sample call{rows_of<const float>(rows), temperatures.data<const double>(), ks.data<const int32_t>(),
                         ps.data<const double>(), min_ps.data<const double>(), seed_bits.data<const int64_t>(),
                         positions.data<const int64_t>(), ids.data<int64_t>(), args["R"], args["V"]};
  check_sampling(call);
  cpu::sample(call, cpu::active_isa(), threads);
}

void gumbel_noise(uint64_t seed, uint32_t output_position, py::handle out) {
  Arguments args;
  const TensorView noise = args.tensor("out", out, kFloat64, kContiguous, {"V"});
  const py::gil_scoped_release released;
  cpu::gumbel_noise(seed, output_position, noise.data<double>(), args["V"]);
}

py::tuple philox4x32(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  const cpu::PhiloxCounter words = cpu::philox4x32_10({c0, c1, c2, c3}, {k0, k1});
  return py::make_tuple(words[0], words[1], words[2], words[3]);
}

cpu::Plan make_plan(int64_t max_num_tokens, int64_t max_num_seqs) {
  if (max_num_tokens < 1 || max_num_seqs < 1) {
    reject("A plan needs room for at least one token and one sequence, got " + std::to_string(max_num_tokens) +
           " and " + std::to_string(max_num_seqs) + ".");
  }
  return cpu::Plan({max_num_tokens, max_num_seqs});
}

void begin_recording(cpu::Plan& plan) {
  if (recorded_plan != nullptr) reject("This thread is recording a plan already.");
  recorded_plan = &plan;
}

void replay(const cpu::Plan& plan, int64_t num_tokens, int64_t num_seqs, int threads) {
  check_threads(threads);
  refuse_to_record("replay");
  const py::gil_scoped_release released;
  plan.replay({num_tokens, num_seqs}, threads);
}

double read_bandwidth(int64_t num_bytes, double seconds, int threads) {
  if (num_bytes < 1) reject("num_bytes: expected at least 1, got " + std::to_string(num_bytes) + ".");
  check_threads(threads);
  const py::gil_scoped_release released;
  return cpu::read_bandwidth(num_bytes, seconds, cpu::active_isa(), threads);
}

double multiply_add_peak(double seconds, int threads) {
  check_threads(threads);
  const py::gil_scoped_release released;
  return cpu::multiply_add_peak(seconds, cpu::active_isa(), threads);
}

}  // namespace
}  // namespace twinfer

PYBIND11_MODULE(_cpu, m) {
  using arg = pybind11::arg;
  m.doc() = "CPU kernels of the fast tier; fast/kernels.py documents them.";
  pybind11::class_<twinfer::cpu::Plan>(m, "Plan")
      .def(pybind11::init(&twinfer::make_plan), arg("max_num_tokens"), arg("max_num_seqs"))
      .def("begin_recording", &twinfer::begin_recording)
      .def("end_recording", [](twinfer::cpu::Plan&) { twinfer::recorded_plan = nullptr; })
      .def("replay", &twinfer::replay, arg("num_tokens"), arg("num_seqs"), arg("threads"))
      .def_property_readonly("num_calls", &twinfer::cpu::Plan::num_calls)
      .def_property_readonly("num_checks", &twinfer::cpu::Plan::num_checks);
  m.def("isa", [] { return twinfer::cpu::isa_name(twinfer::cpu::active_isa()); });
  m.def("reshape_and_cache", &twinfer::reshape_and_cache, arg("key"), arg("value"), arg("k_cache"), arg("v_cache"),
        arg("slot_mapping"), arg("threads"));
  m.def("swap_blocks", &twinfer::swap_blocks, arg("source"), arg("target"), arg("block_mapping"), arg("threads"));
  m.def("paged_attention", &twinfer::paged_attention, arg("out"), arg("query"), arg("k_cache"), arg("v_cache"),
        arg("block_tables"), arg("query_start_loc"), arg("seq_lens"), arg("scale"), arg("sliding_window"),
        arg("threads"));
  pybind11::class_<twinfer::cpu::PackedMatrix>(m, "PackedMatrix")
      .def(pybind11::init(&twinfer::pack), arg("parts"), arg("in_features"), arg("threads"))
      .def_property_readonly("in_features", &twinfer::cpu::PackedMatrix::in_features)
      .def_property_readonly("out_features", &twinfer::cpu::PackedMatrix::out_features)
      .def_property_readonly("num_bytes", &twinfer::cpu::PackedMatrix::num_bytes);
  m.def("linear", &twinfer::linear, arg("out"), arg("x"), arg("weight"), arg("bias").none(true), arg("threads"));
  m.def("linear_silu_and_mul", &twinfer::linear_silu_and_mul, arg("out"), arg("x"), arg("weight"),
        arg("bias").none(true), arg("threads"));
  m.def("linear_argmax", &twinfer::linear_argmax, arg("out"), arg("x"), arg("weight"), arg("threads"));
  m.def("embedding", &twinfer::embedding, arg("out"), arg("ids"), arg("weight"), arg("threads"));
  m.def("position_embedding", &twinfer::position_embedding, arg("out"), arg("positions"), arg("table"), arg("threads"));
  m.def("rms_norm", &twinfer::rms_norm, arg("out"), arg("x"), arg("weight"), arg("eps"), arg("threads"));
  m.def("head_rms_norm", &twinfer::head_rms_norm, arg("x"), arg("weight"), arg("eps"), arg("threads"));
  m.def("fused_add_rms_norm", &twinfer::fused_add_rms_norm, arg("x"), arg("residual"), arg("weight"), arg("eps"),
        arg("threads"));
  m.def("layer_norm", &twinfer::layer_norm, arg("out"), arg("x"), arg("weight"), arg("bias"), arg("eps"),
        arg("threads"));
  m.def("fused_add_layer_norm", &twinfer::fused_add_layer_norm, arg("x"), arg("residual"), arg("weight"), arg("bias"),
        arg("eps"), arg("threads"));
  m.def("rotary_embedding", &twinfer::rotary_embedding, arg("positions"), arg("query"), arg("key"),
        arg("cos_sin_cache"), arg("threads"));
  m.def("silu_and_mul", &twinfer::silu_and_mul, arg("out"), arg("gate_up"), arg("threads"));
  m.def("gelu", &twinfer::gelu, arg("out"), arg("x"), arg("threads"));
  m.def("apply_token_bitmask", &twinfer::apply_token_bitmask, arg("logits"), arg("rows"), arg("bitmasks"),
        arg("threads"));
  m.def("process_logits", &twinfer::process_logits, arg("logits"), arg("rows"), arg("allowed_starts"),
        arg("allowed_ids"), arg("masked_starts"), arg("masked_ids"), arg("biased_starts"), arg("biased_ids"),
        arg("biases"), arg("seen_starts"), arg("seen_ids"), arg("counts"), arg("repetition_penalty"),
        arg("presence_penalty"), arg("frequency_penalty"), arg("threads"));
  m.def("sample", &twinfer::sample, arg("logits"), arg("temperature"), arg("top_k"), arg("top_p"), arg("min_p"),
        arg("seeds"), arg("output_positions"), arg("out"), arg("threads"));
  m.def("gumbel_noise", &twinfer::gumbel_noise, arg("seed"), arg("output_position"), arg("out"));
  m.def("read_bandwidth", &twinfer::read_bandwidth, arg("num_bytes"), arg("seconds"), arg("threads"));
  m.def("multiply_add_peak", &twinfer::multiply_add_peak, arg("seconds"), arg("threads"));
  m.def("philox4x32", &twinfer::philox4x32, arg("c0"), arg("c1"), arg("c2"), arg("c3"), arg("k0"), arg("k1"));
}

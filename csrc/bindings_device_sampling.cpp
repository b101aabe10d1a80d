// The part of fast._simt and fast._cuda that turns logits into tokens; bindings_device.cpp has the rest.
#include "device_call.h"
#include "sampling_checks.h"

namespace twinfer {
namespace {

void philox(py::handle out, py::handle seeds, py::handle output_positions, const std::string& rung_name,
            const Launch& how) {
  Arguments args(kDevice);
  const TensorView words = args.tensor("out", out, kInt32, kRows, {"R", "V"});
  const TensorView seed_bits = args.tensor("seeds", seeds, kInt64, kContiguous, {"R"});
  const TensorView positions = args.tensor("output_positions", output_positions, kInt64, kContiguous, {"R"});
  if (kReadsIndices) {
    check_range("output_positions", positions.data<const int64_t>(), args["R"], 0, int64_t{1} << 32,
                "(a 32-bit Philox counter)");
  }
  const int rung = device::rung_number("philox", rung_name);
  const device::PhiloxArguments call{words.data<int32_t>(), seed_bits.data<const int64_t>(),
                                     positions.data<const int64_t>(), row_stride(words), as_int("out", args["R"]),
                                     as_int("out", args["V"])};
  run(args, how, [&](cudaStream_t stream) { device::philox(call, rung, stream); });
}

void check_lists(const device::ProcessLogitsArguments& call, const Arguments& args) {
  if (!kReadsIndices) return;
  const int64_t num_lists = args["P"], vocab_size = args["V"];
  check_id_lists("allowed_starts", "allowed_ids", call.allowed, num_lists, args["allowed"], vocab_size);
  check_id_lists("masked_starts", "masked_ids", call.masked, num_lists, args["masked"], vocab_size);
  check_id_lists("biased_starts", "biased_ids", call.biased, num_lists, args["biased"], vocab_size);
  check_id_lists("seen_starts", "seen_ids", call.seen, num_lists, args["seen"], vocab_size);
  check_processing(call, args["R"]);
}

void process_logits(py::handle logits, py::handle rows, py::handle allowed_starts, py::handle allowed_ids,
                    py::handle masked_starts, py::handle masked_ids, py::handle biased_starts, py::handle biased_ids,
                    py::handle biases, py::handle seen_starts, py::handle seen_ids, py::handle counts,
                    py::handle repetition_penalty, py::handle presence_penalty, py::handle frequency_penalty,
                    const std::string& rung_name, const Launch& how) {
  Arguments args(kDevice);
  const TensorView values = args.tensor("logits", logits, kFloat32, kRows, {"R", "V"});
  const TensorView processed = args.tensor("rows", rows, kInt64, kContiguous, {"P"});
  args.define("P + 1", args["P"] + 1);
  const auto lists = [&](const char* starts_name, py::handle starts, const char* ids_name, py::handle ids,
                         const char* count) {
    const TensorView offsets = args.tensor(starts_name, starts, kInt64, kContiguous, {"P + 1"});
    const TensorView tokens = args.tensor(ids_name, ids, kInt32, kContiguous, {count});
    return device::IdLists{offsets.data<const int64_t>(), tokens.data<const int32_t>()};
  };
  const device::IdLists allowed = lists("allowed_starts", allowed_starts, "allowed_ids", allowed_ids, "allowed");
  const device::IdLists masked = lists("masked_starts", masked_starts, "masked_ids", masked_ids, "masked");
  const device::IdLists biased = lists("biased_starts", biased_starts, "biased_ids", biased_ids, "biased");
  const TensorView bias = args.tensor("biases", biases, kFloat64, kContiguous, {"biased"});
  const device::IdLists seen = lists("seen_starts", seen_starts, "seen_ids", seen_ids, "seen");
  const TensorView times = args.tensor("counts", counts, kInt32, kContiguous, {"seen"});
  const TensorView repetition = args.tensor("repetition_penalty", repetition_penalty, kFloat64, kContiguous, {"P"});
  const TensorView presence = args.tensor("presence_penalty", presence_penalty, kFloat64, kContiguous, {"P"});
  const TensorView frequency = args.tensor("frequency_penalty", frequency_penalty, kFloat64, kContiguous, {"P"});
  check_vocabulary(values, args["V"]);
  const device::ProcessLogitsArguments call{
      values.data<float>(), row_stride(values), processed.data<const int64_t>(), allowed, masked, biased,
      bias.data<const double>(), seen, times.data<const int32_t>(), repetition.data<const double>(),
      presence.data<const double>(), frequency.data<const double>(), as_int("rows", args["P"]),
      as_int("logits", args["V"])};
  check_lists(call, args);
  const int rung = device::rung_number("penalties", rung_name);
  run(args, how, [&](cudaStream_t stream) { device::process_logits(call, rung, stream); });
}

void sample(py::handle logits, py::handle temperature, py::handle top_k, py::handle top_p, py::handle min_p,
            py::handle seeds, py::handle output_positions, py::handle out, const std::string& rung_name,
            const Launch& how) {
  Arguments args(kDevice);
  const DLDataType dtype = floating_dtype("logits", logits);
  const TensorView rows = args.tensor("logits", logits, dtype, kRows, {"R", "V"});
  const TensorView temperatures = args.tensor("temperature", temperature, kFloat64, kContiguous, {"R"});
  const TensorView ks = args.tensor("top_k", top_k, kInt32, kContiguous, {"R"});
  const TensorView ps = args.tensor("top_p", top_p, kFloat64, kContiguous, {"R"});
  const TensorView min_ps = args.tensor("min_p", min_p, kFloat64, kContiguous, {"R"});
  const TensorView seed_bits = args.tensor("seeds", seeds, kInt64, kContiguous, {"R"});
  const TensorView positions = args.tensor("output_positions", output_positions, kInt64, kContiguous, {"R"});
  const TensorView ids = args.tensor("out", out, kInt64, kContiguous, {"R"});
  check_vocabulary(rows, args["V"]);
  const int rung = device::rung_number("topk_topp_sample", rung_name);
  const int num_rows = as_int("logits", args["R"]), vocab_size = as_int("logits", args["V"]);
  const auto call_of = [&](auto zero) {
    using T = decltype(zero);
    return device::SampleArguments<T>{
        rows.data<const T>(), row_stride(rows), temperatures.data<const double>(), ks.data<const int32_t>(),
        ps.data<const double>(), min_ps.data<const double>(), seed_bits.data<const int64_t>(),
        positions.data<const int64_t>(), ids.data<int64_t>(), num_rows, vocab_size};
  };
  if (kReadsIndices) check_sampling(call_of(float{}));  // which reads no logit
  run(dtype, args, how, [&](auto zero, cudaStream_t stream) { device::sample(call_of(zero), rung, stream); });
}

}  // namespace

void bind_sampling(py::module_& m) {
  using arg = py::arg;
  m.def("philox", &philox, arg("out"), arg("seeds"), arg("output_positions"), arg("rung"), arg("launch"));
  m.def("process_logits", &process_logits, arg("logits"), arg("rows"), arg("allowed_starts"), arg("allowed_ids"),
        arg("masked_starts"), arg("masked_ids"), arg("biased_starts"), arg("biased_ids"), arg("biases"),
        arg("seen_starts"), arg("seen_ids"), arg("counts"), arg("repetition_penalty"), arg("presence_penalty"),
        arg("frequency_penalty"), arg("rung"), arg("launch"));
  m.def("sample", &sample, arg("logits"), arg("temperature"), arg("top_k"), arg("top_p"), arg("min_p"), arg("seeds"),
        arg("output_positions"), arg("out"), arg("rung"), arg("launch"));
}

}  // namespace twinfer

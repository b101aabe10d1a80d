#include <stdexcept>

#include "cuda/launchers.h"

namespace twinfer::device {

const std::vector<Ladder>& ladders() {
  static const std::vector<Ladder> all = {
      {"rms_norm",
       {{"v1_naive", ""},
        {"v2_tree", "sectors"},
        {"v3_shuffle", "barriers"},
        {"v4_vectorised", "global_instructions"}}},
      {"layer_norm", {{"v1_naive", ""}, {"v2_shuffle", "sectors"}, {"v3_welford", "global_bytes"}}},
      {"cache_write", {{"v1_element", ""}, {"v2_vectorised", "global_instructions"}}},
      {"copy_blocks", {{"v1_element", ""}, {"v2_vectorised", "global_instructions"}}},
      {"paged_attention",
       {{"v1_naive", ""},
        {"v2_shared_reduce", "sectors"},
        {"v3_vectorised", "global_instructions"},
        {"v4_split_kv", "block_bytes"},
        {"v5_grouped", "sectors"},
        {"v6_tensor_cores", "shuffles"}}},
      {"prefill_attention", {{"v1_naive", ""}, {"v2_tiled", "sectors"}, {"v3_tensor_cores", "shared_wavefronts"}}},
      {"silu_mul", {{"v1_element", ""}, {"v2_vectorised", "global_instructions"}}},
      {"gelu", {{"v1_element", ""}, {"v2_vectorised", "global_instructions"}}},
      {"rotary", {{"v1_pair", ""}, {"v2_token", "global_bytes"}}},
      {"softmax", {{"v1_naive", ""}, {"v2_shuffle", "sectors"}, {"v3_online", "global_bytes"}}},
      {"argmax", {{"v1_naive", ""}, {"v2_tree", "sectors"}, {"v3_shuffle", "barriers"}}},
      {"swap_blocks", {{"v1_element", ""}, {"v2_vectorised", "global_instructions"}}},
      {"philox", {{"v1_word", ""}, {"v2_block", "global_instructions"}}},
      {"penalties", {{"v1_naive", ""}, {"v2_block", "sectors"}}},
      {"topk_topp_sample", {{"v1_naive", ""}, {"v2_block", "sectors"}, {"v3_eight_way", "global_bytes"}}},
  };
  return all;
}

int rung_number(const std::string& operation, const std::string& name) {
  if (name.empty()) return kBestRung;
  for (const Ladder& ladder : ladders()) {
    if (ladder.operation != operation) continue;
    std::string known;
    for (size_t i = 0; i < ladder.rungs.size(); ++i) {
      if (ladder.rungs[i].name == name) return static_cast<int>(i) + 1;
      known += (i == 0 ? "" : ", ") + ladder.rungs[i].name;
    }
    throw std::invalid_argument("rung: expected one of " + known + ", got " + name + ".");
  }
  throw std::logic_error("no ladder is called " + operation);
}

}  // namespace twinfer::device

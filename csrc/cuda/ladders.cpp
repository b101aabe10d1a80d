#include <stdexcept>

#include "cuda/launchers.h"

namespace twinfer::device {

const std::vector<Ladder>& ladders() {
  static const std::vector<Ladder> all = {
      {"rms_norm", {"v1_naive", "v2_tree", "v3_shuffle", "v4_vectorised"}},
      {"layer_norm", {"v1_naive", "v2_shuffle", "v3_welford"}},
      {"cache_write", {"v1_element", "v2_vectorised"}},
      {"copy_blocks", {"v1_element", "v2_vectorised"}},
      {"paged_attention",
       {"v1_naive", "v2_shared_reduce", "v3_vectorised", "v4_split_kv", "v5_grouped", "v6_tensor_cores"}},
      {"prefill_attention", {"v1_naive", "v2_tiled", "v3_tensor_cores"}},
      {"silu_mul", {"v1_element", "v2_vectorised"}},
      {"gelu", {"v1_element", "v2_vectorised"}},
      {"rotary", {"v1_pair", "v2_token"}},
      {"softmax", {"v1_naive", "v2_shuffle", "v3_online"}},
      {"argmax", {"v1_naive", "v2_tree", "v3_shuffle"}},
      {"swap_blocks", {"v1_element", "v2_vectorised"}},
      {"philox", {"v1_word", "v2_block"}},
      {"penalties", {"v1_naive", "v2_block"}},
      {"topk_topp_sample", {"v1_naive", "v2_block", "v3_eight_way"}},
  };
  return all;
}

int rung_number(const std::string& operation, const std::string& name) {
  if (name.empty()) return kBestRung;
  for (const Ladder& ladder : ladders()) {
    if (ladder.operation != operation) continue;
    std::string known;
    for (size_t i = 0; i < ladder.rungs.size(); ++i) {
      if (ladder.rungs[i] == name) return static_cast<int>(i) + 1;
      known += (i == 0 ? "" : ", ") + ladder.rungs[i];
    }
    throw std::invalid_argument("rung: expected one of " + known + ", got " + name + ".");
  }
  throw std::logic_error("no ladder is called " + operation);
}

}  // namespace twinfer::device

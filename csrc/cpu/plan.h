// The kernel calls of a step, recorded once with the buffers they work on. A replay makes them one after the other,
// with nothing in between: to a CPU it is what a CUDA graph is to a GPU.
//
// A plan is recorded at the largest step it will see. A row of a buffer belongs to a token or to a sequence, so a
// smaller step is the same calls on fewer rows; sizes that follow from the model alone are fixed.
//
// Addresses are recorded, not what they hold: ids, positions, slots and block tables are checked in every replay, each
// array once, however many layers read it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/kernels.h"

namespace twinfer::cpu {

struct StepSize {
  int64_t num_tokens;             // T
  int64_t num_seqs;               // S
};

template <class Call>
void resize(Call& call, const StepSize& size) {
  call.num_tokens = size.num_tokens;
}
inline void resize(PagedAttention& call, const StepSize& size) { call.num_seqs = size.num_seqs; }

template <class Call>
constexpr bool kIsProduct = std::is_same_v<Call, Linear> || std::is_same_v<Call, LinearSiluAndMul>;

// A demand on the numbers of a step; checks with equal keys are one. It throws std::invalid_argument.
struct Check {
  std::vector<int64_t> key;
  std::function<void(const StepSize&)> run;
};

class Plan {
 public:
  explicit Plan(const StepSize& largest) : largest_(largest) {}

  // Adds a call. `kernel(call, threads)` runs it, once it has the size of a step. Throws std::invalid_argument if it was
  // not recorded at the plan's size.
  template <class Call, class Kernel>
  void record(const Call& call, const Kernel& kernel, const StepSize& size, const std::vector<Check>& checks) {
    if (size.num_tokens != largest_.num_tokens) {
      throw std::invalid_argument("A plan of " + std::to_string(largest_.num_tokens) +
                                  " tokens cannot record a call on " + std::to_string(size.num_tokens) + " rows.");
    }
    for (const Check& check : checks) {
      bool known = false;
      for (const Check& other : checks_) known = known || other.key == check.key;
      if (!known) checks_.push_back(check);
    }
    const ReadAhead* ahead = nullptr;
    if constexpr (kIsProduct<Call>) ahead = product_before_attention(call);
    if constexpr (std::is_same_v<Call, PagedAttention>) attention_after_products(call);
    calls_.push_back([call, kernel, ahead](const StepSize& step, const ContextLines& contexts, int threads) {
      Call sized = call;
      resize(sized, step);
      if constexpr (kIsProduct<Call>) {
        sized.ahead = *ahead;
        sized.ahead.contexts = &contexts;
      }
      kernel(sized, threads);
    });
  }

  // Throws std::invalid_argument, before anything is written, if the step is too large or a check fails.
  void replay(const StepSize& step, int threads) const {
    require("tokens", step.num_tokens, largest_.num_tokens);
    require("sequences", step.num_seqs, largest_.num_seqs);
    for (const Check& check : checks_) check.run(step);
    const ContextLines contexts = contexts_of(step, threads);
    for (const Step& call : calls_) call(step, contexts, threads);
  }

  size_t num_calls() const { return calls_.size(); }
  size_t num_checks() const { return checks_.size(); }

 private:
  using Step = std::function<void(const StepSize&, const ContextLines&, int threads)>;
  struct Waiting {
    ReadAhead* ahead;
    double numbers;                 // of the product's weights
  };

  // Between two attentions each product asks for as large a part of what the second one reads as it has of their work.
  template <class Product>
  const ReadAhead* product_before_attention(const Product& call) {
    if (!aheads_.empty()) {
      aheads_.back().next_weight = call.weight;
      aheads_.back().next_in_halves = std::is_same_v<Product, LinearSiluAndMul>;
    }
    aheads_.emplace_back();
    const double numbers = static_cast<double>(call.weight->out_features()) * call.weight->in_features();
    waiting_.push_back({&aheads_.back(), numbers});
    return &aheads_.back();
  }

  void attention_after_products(const PagedAttention& call) {
    double all = 0, before = 0;
    for (const Waiting& product : waiting_) all += product.numbers;
    for (const Waiting& product : waiting_) {
      ReadAhead& ahead = *product.ahead;
      ahead.k_cache = call.k_cache;
      ahead.v_cache = call.v_cache;
      ahead.begin = before / all;
      ahead.end = (before + product.numbers) / all;
      before += product.numbers;
    }
    waiting_.clear();
    if (!attention_) attention_ = call;
  }

  // The same in every layer.
  ContextLines contexts_of(const StepSize& step, int threads) const {
    if (!attention_ || step.num_tokens < kMinRowsAhead) return {};
    PagedAttention sized = *attention_;
    resize(sized, step);
    return lines_to_read(sized, threads);
  }

  static void require(const char* what, int64_t count, int64_t largest) {
    if (count >= 1 && count <= largest) return;
    throw std::invalid_argument(std::string("A plan of 1 to ") + std::to_string(largest) + " " + what +
                                " cannot be replayed for " + std::to_string(count) + ".");
  }

  StepSize largest_;
  std::vector<Check> checks_;
  std::vector<Step> calls_;
  std::deque<ReadAhead> aheads_;      // of the products; calls hold their addresses
  std::vector<Waiting> waiting_;      // since the last attention
  std::optional<PagedAttention> attention_;  // the first
};

}  // namespace twinfer::cpu

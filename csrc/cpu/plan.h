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
#include <functional>
#include <stdexcept>
#include <string>
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
    calls_.push_back([call, kernel](const StepSize& step, int threads) {
      Call sized = call;
      resize(sized, step);
      kernel(sized, threads);
    });
  }

  // Throws std::invalid_argument, before anything is written, if the step is too large or a check fails.
  void replay(const StepSize& step, int threads) const {
    require("tokens", step.num_tokens, largest_.num_tokens);
    require("sequences", step.num_seqs, largest_.num_seqs);
    for (const Check& check : checks_) check.run(step);
    for (const Step& call : calls_) call(step, threads);
  }

  size_t num_calls() const { return calls_.size(); }
  size_t num_checks() const { return checks_.size(); }

 private:
  using Step = std::function<void(const StepSize&, int threads)>;

  static void require(const char* what, int64_t count, int64_t largest) {
    if (count >= 1 && count <= largest) return;
    throw std::invalid_argument(std::string("A plan of 1 to ") + std::to_string(largest) + " " + what +
                                " cannot be replayed for " + std::to_string(count) + ".");
  }

  StepSize largest_;
  std::vector<Check> checks_;
  std::vector<Step> calls_;
};

}  // namespace twinfer::cpu

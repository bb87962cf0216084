#include "shm/process.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>

namespace mcp::shm {
namespace {

constexpr const char* kFolder = "/dev/shm";

// State letter and start time of process `id`; false when there is none.
bool read_stat(int64_t id, char* state, uint64_t* start) {
  std::ifstream file("/proc/" + std::to_string(id) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return false;
  const size_t name_end = line.rfind(')');  // the name may hold spaces and parentheses
  if (name_end == std::string::npos) return false;
  std::istringstream fields(line.substr(name_end + 1));
  fields >> *state;
  std::string skipped;
  for (int field = 4; field < 22; ++field) fields >> skipped;
  return static_cast<bool>(fields >> *start);
}

uint64_t pid_namespace() {
  struct stat status;
  return ::stat("/proc/self/ns/pid", &status) == 0 ? status.st_ino : 0;
}

int cores_of_quota() {
  double quota = 0, period = 0;
  std::string word;
  if (std::ifstream("/sys/fs/cgroup/cpu.max") >> word >> period && word != "max") {
    quota = std::strtod(word.c_str(), nullptr);
  } else if (!(std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> quota) ||
             !(std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period)) {
    return 0;
  }
  return quota > 0 && period > 0 ? std::max(1, static_cast<int>(quota / period)) : 0;
}

std::atomic<uint64_t> forks{0};
const int fork_handler =
    ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

Process this_process() {
  Process process;
  char state;
  process.id = ::getpid();
  process.name_space = pid_namespace();
  if (!read_stat(process.id, &state, &process.start)) {
    throw std::runtime_error("shm: /proc must be mounted, as Linux does");
  }
  return process;
}

bool has_ended(const Process& process) {
  if (process.name_space == 0 || process.name_space != pid_namespace()) return false;
  char state;
  uint64_t start;
  if (!read_stat(process.id, &state, &start)) {
    return ::access("/proc/self/stat", R_OK) == 0;  // else /proc is gone, not the process
  }
  return start != process.start || state == 'Z' || state == 'X';
}

int usable_cores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  int cores = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0) cores = CPU_COUNT(&allowed);
  const int quota = cores_of_quota();
  return std::max(1, quota > 0 ? std::min(cores, quota) : cores);
}

uint64_t fork_generation() { return forks.load(std::memory_order_relaxed); }

std::string segment_name(const Process& creator, const std::string& suffix) {
  return "mcp-" + std::to_string(::geteuid()) + "-" + std::to_string(creator.name_space) + "-" +
         std::to_string(creator.id) + "-" + std::to_string(creator.start) + "-" + suffix;
}

int remove_orphans() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(kFolder), ::closedir);
  int removed = 0;
  while (const dirent* entry = folder ? ::readdir(folder.get()) : nullptr) {
    unsigned long user, space, id, start;
    if (std::sscanf(entry->d_name, "mcp-%lu-%lu-%lu-%lu-", &user, &space, &id, &start) != 4) {
      continue;
    }
    if (user == ::geteuid() && has_ended({static_cast<int64_t>(id), start, space})) {
      removed += ::unlink((std::string(kFolder) + "/" + entry->d_name).c_str()) == 0;
    }
  }
  return removed;
}

}  // namespace mcp::shm

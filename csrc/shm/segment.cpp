#include "shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "common/red_zone.h"

namespace mcp::shm {
namespace {

constexpr const char* kFolder = "/dev/shm";
constexpr size_t kMaxName = 200;  // file systems stop at 255

std::string path_of(const std::string& name) { return std::string(kFolder) + "/" + name; }

[[noreturn]] void fail(int code, const std::string& what) {
  throw std::system_error(code, std::generic_category(), what);
}

void check(const std::string& name, size_t bytes) {
  if (name.empty() || name.size() > kMaxName || name.front() == '.' ||
      name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
    throw std::invalid_argument("Segment: name must be 1 to " + std::to_string(kMaxName) +
                                " characters without \"/\" and no leading \".\", got \"" + name +
                                "\"");
  }
  if (bytes == 0) throw std::invalid_argument("Segment: bytes must be >= 1, got 0");
}

// Closes on every way out.
class File {
 public:
  File(const std::string& path, int flags) : descriptor_(::open(path.c_str(), flags, 0600)) {}
  ~File() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

void* map(const File& file, size_t bytes, const std::string& name) {
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.descriptor(), 0);
  if (data == MAP_FAILED) fail(errno, "Segment " + name + ": cannot map it");
  return data;
}

}  // namespace

std::string host_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  struct stat folder;
  char ipc[64];
  const ssize_t length = ::readlink("/proc/self/ns/ipc", ipc, sizeof ipc);
  if (boot.empty() || length <= 0 || ::stat(kFolder, &folder) != 0) {
    throw std::runtime_error("host_id: /proc and /dev/shm must be mounted, as Linux does");
  }
  return boot + "/" + std::to_string(folder.st_dev) + "/" + std::string(ipc, length);
}

Segment::Segment(std::string name, size_t bytes, bool creator)
    : name_(std::move(name)), bytes_(bytes), creator_(creator ? ::getpid() : 0) {}

Segment::Segment(Segment&& other) noexcept
    : name_(std::move(other.name_)),
      bytes_(other.bytes_),
      data_(std::exchange(other.data_, nullptr)),
      device_(other.device_),
      inode_(std::exchange(other.inode_, 0)),
      creator_(std::exchange(other.creator_, 0)) {}

Segment Segment::create(const std::string& name, size_t bytes) {
  check(name, bytes);
  const std::string path = path_of(name);
  const File file(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW);
  if (file.descriptor() < 0) fail(errno, "Segment " + name + ": cannot create it");

  Segment segment(name, bytes, true);  // from here on a failure takes the name away again
  struct stat status;
  if (::fstat(file.descriptor(), &status) != 0) fail(errno, "Segment " + name);
  segment.device_ = status.st_dev;
  segment.inode_ = status.st_ino;
  const int failed = ::posix_fallocate(file.descriptor(), 0, static_cast<off_t>(bytes));
  if (failed != 0) {
    fail(failed,
         "Segment " + name + ": cannot reserve " + std::to_string(bytes) + " bytes in " + kFolder);
  }
  segment.data_ = map(file, bytes, name);
  return segment;
}

Segment Segment::open(const std::string& name, size_t bytes) {
  check(name, bytes);
  const File file(path_of(name), O_RDWR | O_CLOEXEC | O_NOFOLLOW);
  if (file.descriptor() < 0) fail(errno, "Segment " + name + ": cannot open it");
  struct stat status;
  if (::fstat(file.descriptor(), &status) != 0) fail(errno, "Segment " + name);
  if (!S_ISREG(status.st_mode) || status.st_uid != ::geteuid()) {
    fail(EPERM, "Segment " + name + ": must be a file of this user");
  }
  if (static_cast<size_t>(status.st_size) != bytes) {
    throw std::invalid_argument("Segment " + name + ": bytes must be its size, " +
                                std::to_string(status.st_size) + ", got " + std::to_string(bytes));
  }
  Segment segment(name, bytes, false);
  segment.device_ = status.st_dev;
  segment.inode_ = status.st_ino;
  segment.data_ = map(file, bytes, name);
  return segment;
}

Segment::~Segment() {
  if (data_ != nullptr) {
    allow(data_, bytes_);  // what is mapped there next knows nothing of these gaps
    ::munmap(data_, bytes_);
  }
  if (creator_ != 0 && creator_ == ::getpid()) {
    try {
      unlink();
    } catch (const std::system_error&) {
      // A destructor has nobody to tell; the name stays as after a killed process.
    }
  }
}

void Segment::unlink() {
  const std::string path = path_of(name_);
  struct stat status;
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;
    fail(errno, "Segment " + name_);
  }
  if (status.st_dev != device_ || status.st_ino != inode_) return;
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    fail(errno, "Segment " + name_ + ": cannot unlink it");
  }
}

void Segment::remove(const std::string& name) {
  check(name, 1);
  if (::unlink(path_of(name).c_str()) != 0 && errno != ENOENT) {
    fail(errno, "Segment " + name + ": cannot unlink it");
  }
}

}  // namespace mcp::shm

// The group's face in Python: addresses and counts in, the lock on the interpreter released.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>

#include "common/isa.h"
#include "shm/group.h"
#include "shm/mailbox.h"
#include "shm/module.h"

namespace py = pybind11;

namespace mcp::shm {
namespace {

using Address = uintptr_t;
using Addresses = std::vector<Address>;

void* at(Address address) { return reinterpret_cast<void*>(address); }

template <class Pointer>
std::vector<Pointer> all_at(const Addresses& addresses) {
  std::vector<Pointer> pointers;
  for (const Address address : addresses) pointers.push_back(reinterpret_cast<Pointer>(address));
  return pointers;
}

// Ctrl-C and Python's other signal handlers work in a long wait. Handlers run in the main thread
// alone; in any other this is only a short hold of the lock.
void check_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

// A transfer and what keeps its mailbox alive.
struct PendingTransfer {
  std::shared_ptr<Group> group;
  std::shared_ptr<Transfer> transfer;
};

std::shared_ptr<Group> make_group(const std::string& name, const std::string& token, int rank,
                                  int world, size_t slot_bytes, size_t ring_bytes, int crowd,
                                  double timeout_s) {
  const auto require = [](bool holds, const char* rule, auto got) {
    if (holds) return;
    std::ostringstream text;
    text << "Group: " << rule << ", got " << got;
    throw std::invalid_argument(text.str());
  };
  require(world >= 1, "world must be >= 1", world);
  require(rank >= 0 && rank < world, "rank must be in [0, world)", rank);
  const size_t smallest = std::max<size_t>(Layout::kPage, kLine * static_cast<size_t>(world));
  require(slot_bytes >= smallest && slot_bytes % Layout::kPage == 0,
          "slot_bytes must be whole pages with a line for each rank", slot_bytes);
  require(ring_bytes >= Layout::kPage && (ring_bytes & (ring_bytes - 1)) == 0,
          "ring_bytes must be a power of two, at least a page", ring_bytes);
  require(timeout_s > 0, "timeout_s must be > 0", timeout_s);
  GroupConfig config;
  config.name = name;
  config.token = token;
  config.rank = rank;
  config.world = world;
  config.slot_bytes = slot_bytes;
  config.ring_bytes = ring_bytes;
  config.crowd = crowd;
  config.timeout_s = timeout_s;
  auto group = std::make_shared<Group>(config);
  group->set_interrupt_check(check_signals);
  return group;
}

void add_enums(py::module_& m) {
  py::enum_<Type>(m, "Type", "Element types that can be reduced.")
      .value("float32", Type::kFloat32)
      .value("float64", Type::kFloat64)
      .value("bfloat16", Type::kBFloat16)
      .value("float16", Type::kFloat16)
      .value("int64", Type::kInt64)
      .value("int32", Type::kInt32)
      .value("int16", Type::kInt16)
      .value("int8", Type::kInt8)
      .value("uint8", Type::kUInt8);
  py::enum_<Reduction>(m, "Reduction", "How two elements become one.")
      .value("sum", Reduction::kSum)
      .value("product", Reduction::kProduct)
      .value("min", Reduction::kMin)
      .value("max", Reduction::kMax)
      .value("bit_and", Reduction::kAnd)
      .value("bit_or", Reduction::kOr)
      .value("bit_xor", Reduction::kXor);
}

// What the group does with the ranks' copies, on memory of one process: for tests of each set.
void add_reduce(py::module_& m) {
  m.def("supported_isas", [] {
    std::vector<std::string> names;
    for (const Isa isa : supported_isas()) names.push_back(isa_name(isa));
    return names;
  });
  m.def("set_isa", &set_isa, py::arg("name"), "Choose the instruction set of reductions.");
  m.def(
      "reduce",
      [](const Addresses& sources, Address out, Address copy, size_t n, Type type,
         Reduction reduction, bool average) {
        const std::vector<const void*> pointers = all_at<const void*>(sources);
        find_reduce(type, reduction)(
            {pointers.data(), static_cast<int>(pointers.size()), at(out), at(copy), n, average});
      },
      "Reduce [n] elements of every source into out, and copy where it is not 0.");
}

void add_transfer(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<PendingTransfer>(m, "Transfer", "A send or receive that completes later.")
      .def(
          "test",
          [](const PendingTransfer& self) { return self.group->mailbox().test(self.transfer); },
          Released(), "Whether it is done; moves what can be moved.")
      .def(
          "wait",
          [](const PendingTransfer& self, double timeout_s) {
            self.group->mailbox().wait(self.transfer, timeout_s);
          },
          py::arg("timeout_s") = 0.0, Released(), "Until it is done; 0 is the group's timeout.")
      .def_property_readonly(
          "done", [](const PendingTransfer& self) -> bool { return self.transfer->done; })
      .def_property_readonly(
          "peer", [](const PendingTransfer& self) -> int { return self.transfer->peer; });
}

}  // namespace

void add_group(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::register_exception<GroupError>(m, "GroupError", PyExc_RuntimeError);
  add_enums(m);
  add_reduce(m);
  add_transfer(m);
  m.def("usable_cores", &usable_cores, "Cores by affinity and cgroup quota.");
  m.def("remove_orphans", &remove_orphans, "Unlink segments of processes that are gone.");
  py::class_<Group, std::shared_ptr<Group>>(
      m, "Group", "The ranks of one host; csrc/shm/group.h says what each call does.")
      .def(py::init(&make_group), py::arg("name"), py::arg("token"), py::arg("rank"),
           py::arg("world"), py::arg("slot_bytes"), py::arg("ring_bytes"), py::arg("crowd"),
           py::arg("timeout_s"))
      .def_property_readonly("segment_name", &Group::segment_name)
      .def_property_readonly("calls", &Group::calls)
      .def("connect", &Group::connect, py::arg("names"), Released())
      .def_static("remove", &Group::remove, py::arg("names"))
      .def("set_timeout", &Group::set_timeout, py::arg("seconds"))
      .def("abort", &Group::abort, py::arg("reason"), Released())
      .def("barrier", &Group::barrier, Released())
      .def(
          "all_reduce",
          [](Group& self, Address in, Address out, size_t n, Type type, Reduction reduction,
             bool average) { self.all_reduce(at(in), at(out), n, type, reduction, average); },
          Released())
      .def(
          "reduce",
          [](Group& self, Address in, Address out, size_t n, Type type, Reduction reduction,
             bool average,
             int root) { self.reduce(at(in), at(out), n, type, reduction, average, root); },
          Released())
      .def(
          "reduce_scatter",
          [](Group& self, Address in, Address out, size_t n, Type type, Reduction reduction,
             bool average) { self.reduce_scatter(at(in), at(out), n, type, reduction, average); },
          Released())
      .def(
          "all_gather",
          [](Group& self, Address in, const Addresses& rows, size_t bytes) {
            self.all_gather(at(in), all_at<void*>(rows), bytes);
          },
          Released())
      .def(
          "broadcast",
          [](Group& self, Address data, size_t bytes, int root) {
            self.broadcast(at(data), bytes, root);
          },
          Released())
      .def(
          "all_to_all",
          [](Group& self, const Addresses& in, const std::vector<size_t>& in_bytes,
             const Addresses& out, const std::vector<size_t>& out_bytes) {
            self.all_to_all(all_at<const void*>(in), in_bytes, all_at<void*>(out), out_bytes);
          },
          Released())
      .def(
          "scatter",
          [](Group& self, const Addresses& rows, Address out, size_t bytes, int root) {
            self.scatter(all_at<const void*>(rows), at(out), bytes, root);
          },
          Released())
      .def(
          "gather",
          [](Group& self, Address in, const Addresses& rows, size_t bytes, int root) {
            self.gather(at(in), all_at<void*>(rows), bytes, root);
          },
          Released())
      .def(
          "send",
          [](const std::shared_ptr<Group>& self, Address data, size_t bytes, int peer,
             uint64_t tag) {
            return PendingTransfer{self, self->mailbox().send(at(data), bytes, peer, tag)};
          },
          Released())
      .def(
          "receive",
          [](const std::shared_ptr<Group>& self, Address data, size_t bytes, int peer,
             uint64_t tag) {
            return PendingTransfer{self, self->mailbox().receive(at(data), bytes, peer, tag)};
          },
          Released());
}

}  // namespace mcp::shm

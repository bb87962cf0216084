// The workspace's face in Python; csrc/shm/workspace.h says what each call does.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "shm/module.h"
#include "shm/workspace.h"

namespace py = pybind11;

namespace mcp::shm {
namespace {

using Address = uintptr_t;

char* at(Address address) { return reinterpret_cast<char*>(address); }

}  // namespace

void add_workspace(py::module_& m) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::enum_<Op>(m, "Op", "Calls that a workspace serves.")
      .value("matmul_reduce_scatter", Op::kMatmulReduceScatter)
      .value("all_gather_matmul", Op::kAllGatherMatmul);
  m.attr("DEPTH") = kDepth;
  py::class_<Workspace, std::shared_ptr<Workspace>>(
      m, "Workspace", py::buffer_protocol(),
      "Slots that a matmul computes into, a writable buffer; and the collective over them.")
      .def(py::init<std::shared_ptr<Group>, const std::string&, size_t>(), py::arg("group"),
           py::arg("token"), py::arg("slot_bytes"))
      .def_property_readonly("segment_name", &Workspace::segment_name)
      .def("connect", &Workspace::connect, py::arg("names"), Released())
      .def(
          "begin_sum",
          [](Workspace& self, Op op, Type type, size_t rows, size_t columns, size_t period,
             size_t first, size_t count, size_t first_column, size_t num_columns, Address out,
             size_t out_pitch, Address bias, bool in_stages) {
            return self.begin_sum({op, type, rows, columns, period, first, count, first_column,
                                   num_columns, at(out), out_pitch, at(bias), in_stages});
          },
          Released())
      .def(
          "begin_gather",
          [](Workspace& self, Op op, Type type, size_t outer, const std::vector<size_t>& runs,
             Address out,
             size_t pitch) { return self.begin_gather({op, type, outer, runs, at(out), pitch}); },
          Released())
      .def("next_slot", &Workspace::next_slot, Released())
      .def("publish_sum", &Workspace::publish_sum, Released())
      .def("publish_whole", &Workspace::publish_whole, Released())
      .def("publish_piece", &Workspace::publish_piece, Released())
      .def("advance", &Workspace::advance, Released())
      .def("take", &Workspace::take, Released())
      .def("finish", &Workspace::finish, Released())
      .def_buffer([](Workspace& self) {
        return py::buffer_info(reinterpret_cast<unsigned char*>(self.slots()),
                               static_cast<py::ssize_t>(self.bytes()), false);
      });
}

}  // namespace mcp::shm

// mcp_kernels._C: loading it registers the compiled bodies; its few functions are about the CPU.
// Limited API, so that one build serves every Python from 3.10 on.
#include <Python.h>

#include <exception>
#include <string>

#include "common/isa.h"

namespace {

PyObject* cpu_isa(PyObject*, PyObject*) {
  try {
    return PyUnicode_FromString(mcp::isa_name(mcp::current_isa()));
  } catch (const std::exception& failure) {
    PyErr_SetString(PyExc_ValueError, failure.what());
    return nullptr;
  }
}

PyObject* default_cpu_isa(PyObject*, PyObject*) {
  return PyUnicode_FromString(mcp::isa_name(mcp::default_isa()));
}

PyObject* cpu_isa_of(PyObject*, PyObject* args) {
  const char* op = nullptr;
  int is_bfloat16 = 0;
  if (!PyArg_ParseTuple(args, "sp", &op, &is_bfloat16)) return nullptr;
  try {
    return PyUnicode_FromString(mcp::isa_name(mcp::body_isa(op, is_bfloat16 != 0)));
  } catch (const std::exception& failure) {
    PyErr_SetString(PyExc_ValueError, failure.what());
    return nullptr;
  }
}

PyObject* cpu_isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  if (names == nullptr) return nullptr;
  for (mcp::Isa isa : mcp::supported_isas()) {
    PyObject* name = PyUnicode_FromString(mcp::isa_name(isa));
    const int failed = name == nullptr || PyList_Append(names, name) != 0;
    Py_XDECREF(name);
    if (failed) {
      Py_DECREF(names);
      return nullptr;
    }
  }
  return names;
}

PyObject* set_cpu_isa(PyObject*, PyObject* args) {
  const char* name = nullptr;
  if (!PyArg_ParseTuple(args, "s", &name)) return nullptr;
  try {
    mcp::set_isa(name);
  } catch (const std::exception& failure) {
    PyErr_SetString(PyExc_ValueError, failure.what());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyObject* has_cuda(PyObject*, PyObject*) {
#ifdef MCP_WITH_CUDA
  Py_RETURN_TRUE;
#else
  Py_RETURN_FALSE;
#endif
}

PyMethodDef methods[] = {
    {"cpu_isa", cpu_isa, METH_NOARGS, "Instruction set that the CPU bodies run on now."},
    {"default_cpu_isa", default_cpu_isa, METH_NOARGS, "Instruction set where none is forced."},
    {"cpu_isa_of", cpu_isa_of, METH_VARARGS,
     "Instruction set of the body that an op runs now, by its name and whether it takes bfloat16."},
    {"cpu_isas", cpu_isas, METH_NOARGS, "Instruction sets that this CPU can run, lowest first."},
    {"set_cpu_isa", set_cpu_isa, METH_VARARGS, "Move later calls to another instruction set."},
    {"has_cuda", has_cuda, METH_NOARGS, "Whether CUDA bodies were built in."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_C",
                      "Compiled bodies of mcp_kernels.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }

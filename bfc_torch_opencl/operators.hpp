// The operators: memory and views here, copies and a few kernels in Python, and everything else on the host.
#pragma once

#include "hooks.hpp"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/add_ops.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/div_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/mm_ops.h>
#include <ATen/ops/mul_ops.h>
#include <ATen/ops/relu_ops.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/sum_ops.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

namespace bfc_opencl {

using Sizes = c10::IntArrayRef;
template <class T> using Maybe = std::optional<T>;

// -- operators that run on the host ----------------------------------------------------------------------------------

struct Fallbacks {
    std::mutex lock;
    std::map<std::string, int64_t> calls;   // by the operator's name
};

inline Fallbacks& fallbacks() {
    static auto* counts = new Fallbacks;
    return *counts;
}

inline void count_fallback(const std::string& name) {
    const std::lock_guard<std::mutex> held(fallbacks().lock);
    fallbacks().calls[name]++;
}

// Lengths of sequences lie on the host, whatever device the sequences are on.
inline bool takes_lengths(const std::string& name) { return name.find("pad_packed") != std::string::npos; }

// The one device that the tensors of a call are on. Numbers on the host, tensors without dimensions, go with any, and
// so do indices: the lists in which a tensor may be missing.
inline c10::Device device_of(const std::string& name, c10::ArrayRef<c10::IValue> arguments) {
    Maybe<c10::Device> found;
    const auto look = [&](const at::Tensor& tensor) {
        if (!tensor.defined() || (tensor.is_cpu() && (tensor.dim() == 0 || takes_lengths(name)))) return;
        TORCH_CHECK(!found || *found == tensor.device(), name, " has tensors on ", *found, " and on ", tensor.device(),
                    ": move one of them with .to(...) first");
        found = tensor.device();
    };
    for (const c10::IValue& argument : arguments) {
        if (argument.isTensor()) look(argument.toTensor());
        else if (argument.isTensorList()) for (const auto& tensor : argument.toTensorVector()) look(tensor);
    }
    return found.value_or(c10::Device(kType, current_device));
}

inline bool is_generator(const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// The host's kernels take a generator of the host. A caller gives one of the tensors' device, as with CUDA.
inline void give_host_generators(const c10::FunctionSchema& schema, c10::Device device, torch::jit::Stack* stack) {
    const size_t count = schema.arguments().size();
    for (size_t place = 0; place < count; place++) {
        if (!is_generator(schema.arguments()[place])) continue;
        c10::IValue& argument = torch::jit::peek(*stack, place, count);
        const bool is_ours = device.type() == kType;
        const at::Generator given = argument.isNone() ? default_generator(is_ours ? device.index() : current_device)
                                                      : argument.toGenerator();
        if (!is_ours && given.device().type() != kType) continue;
        TORCH_CHECK(is_ours && given.device().type() == kType, schema.name(), " has a generator of ", given.device(),
                    " and tensors on ", device, ": make one with torch.Generator(\"", device.type(), "\")");
        argument = given.get<Generator>()->host();
    }
}

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    refuse_child();
    const auto& schema = op.schema();
    const auto arguments = torch::jit::last(*stack, schema.arguments().size());
    const c10::Device device = device_of(schema.name(), arguments);
    count_fallback(c10::toString(op.operator_name()));
    give_host_generators(schema, device, stack);
    at::native::cpu_fallback(op, stack);
}

template <class Operator>
using on_host = at::native::call_fallback_fn<&fallback, Operator>;

// Upstream's fallback does not serve convolutions: they have operators of their own for other back ends.
inline at::Tensor to_host(const at::Tensor& tensor) { return tensor.defined() ? tensor.cpu() : tensor; }

inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const Maybe<at::Tensor>& bias, Sizes stride,
                              Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, int64_t groups) {
    count_fallback("aten::convolution_overrideable");
    device_of("aten::convolution", {input, weight, bias});
    const Maybe<at::Tensor> host_bias = bias ? Maybe<at::Tensor>(to_host(*bias)) : std::nullopt;
    return at::convolution(input.cpu(), weight.cpu(), host_bias, stride, padding, dilation, transposed, output_padding,
                           groups).to(input.device());
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, Sizes stride, Sizes padding,
    Sizes dilation, bool transposed, Sizes output_padding, int64_t groups, std::array<bool, 3> wanted) {
    count_fallback("aten::convolution_backward_overrideable");
    device_of("aten::convolution_backward", {gradient, input, weight});
    const int64_t bias_size = transposed ? weight.size(1) * groups : weight.size(0);
    auto found = at::convolution_backward(gradient.cpu(), input.cpu(), weight.cpu(), at::IntArrayRef({bias_size}), stride,
                                          padding, dilation, transposed, output_padding, groups, wanted);
    const auto back = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(input.device()) : tensor; };
    return {back(std::get<0>(found)), back(std::get<1>(found)), back(std::get<2>(found))};
}

// -- memory and views ------------------------------------------------------------------------------------------------

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline void check_options(Maybe<at::Layout> layout, Maybe<bool> pinned) {
    TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "tensors on opencl are strided: they have no layout ",
                c10::layout_or_default(layout));
    TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "only memory of the host can be pinned");
}

inline at::Tensor empty(Sizes size, Maybe<at::ScalarType> type, Maybe<at::Layout> layout, Maybe<at::Device> device,
                        Maybe<bool> pinned, Maybe<at::MemoryFormat> format) {
    check_options(layout, pinned);
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_generic(size, &allocator, kKeys, c10::dtype_or_default(type), format);
}

inline at::Tensor empty_strided(Sizes size, Sizes stride, Maybe<at::ScalarType> type, Maybe<at::Layout> layout,
                                Maybe<at::Device> device, Maybe<bool> pinned) {
    check_options(layout, pinned);
    const c10::DeviceGuard guard(c10::device_or_default(device));
    return at::detail::empty_strided_generic(size, stride, &allocator, kKeys, c10::dtype_or_default(type));
}

inline void reserve(c10::TensorImpl& tensor) {
    if (tensor.numel() == 0) return;
    const size_t nbytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                           tensor.storage_offset());
    if (nbytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), nbytes);
}

inline const at::Tensor& resize(const at::Tensor& self, Sizes size, Maybe<at::MemoryFormat> format) {
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    if (impl->sizes() != size) impl->set_sizes_contiguous(size);
    if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    reserve(*impl);
    return self;
}

inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, Sizes size, Sizes stride) {
    at::native::checkSetStorage(self, std::move(source), offset, size, stride);
    c10::TensorImpl* impl = self.unsafeGetTensorImpl();
    impl->set_storage_offset(offset);
    if (stride.data() == nullptr) impl->set_sizes_contiguous(size);
    else impl->set_sizes_and_strides(size, stride);
    reserve(*impl);
    return self;
}

inline at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
    const auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
    return set_storage(self, std::move(source), 0, {items}, {});
}

inline at::Tensor& set_empty(at::Tensor& self) {
    const c10::DeviceGuard guard(self.device());
    return set_whole_storage(self, at::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true));
}

inline void record_stream(at::Tensor& self, c10::Stream stream) {
    allocator.recordStream(self.storage().data_ptr(), stream);
}

// -- copies ------------------------------------------------------------------------------------------------------------

inline at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
    tell("copy", to, self, non_blocking);
    return to;
}

// An out= that gets another size also gets the strides that the operator chose on the host.
inline at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    if (to.sizes() != self.sizes()) {
        to.unsafeGetTensorImpl()->set_sizes_and_strides(self.sizes(), self.strides());
        reserve(*to.unsafeGetTensorImpl());
    }
    return copy_from(self, to, false);
}

inline at::Scalar item(const at::Tensor& self) { return self.cpu().item(); }

// -- kernels -----------------------------------------------------------------------------------------------------------

inline bool is_float(const at::Tensor& tensor) {
    return tensor.device().type() == kType && tensor.scalar_type() == at::kFloat;
}

inline bool is_number(const at::Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0 && !tensor.is_complex(); }

// Whether the kernels serve `out = self op other`: float32 on one device, with the shape that the operands broadcast to.
inline bool serves(const at::Tensor& self, const at::Tensor& other, const at::Tensor& out) {
    if (!is_float(out) || out.numel() == 0) return false;
    if (!(is_float(self) && self.device() == out.device()) && !is_number(self)) return false;
    if (!(is_float(other) && other.device() == out.device()) && !is_number(other)) return false;
    return at::infer_size(self.sizes(), other.sizes()) == out.sizes();
}

inline bool compute(const char* name, const at::Tensor& out, const at::Tensor& self, const at::Tensor& other, double alpha = 1) {
    return serves(self, other, out) && ask_for<bool>("binary", name, out, self, other, alpha);
}

inline at::Tensor& add_out(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha, at::Tensor& out) {
    if (!alpha.isComplex() && compute("add", out, self, other, alpha.toDouble())) return out;
    return on_host<at::_ops::add_out>::call(self, other, alpha, out);
}

inline at::Tensor& sub_out(const at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha, at::Tensor& out) {
    if (!alpha.isComplex() && compute("sub", out, self, other, alpha.toDouble())) return out;
    return on_host<at::_ops::sub_out>::call(self, other, alpha, out);
}

inline at::Tensor& mul_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
    return compute("mul", out, self, other) ? out : on_host<at::_ops::mul_out>::call(self, other, out);
}

inline at::Tensor& div_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
    return compute("div", out, self, other) ? out : on_host<at::_ops::div_out>::call(self, other, out);
}

inline at::Tensor relu(const at::Tensor& self) {
    if (is_float(self)) {
        at::Tensor out = at::empty_like(self);
        if (ask_for<bool>("relu", out, self)) return out;
    }
    return on_host<at::_ops::relu>::call(self);
}

inline at::Tensor& relu_in_place(at::Tensor& self) {
    if (is_float(self) && ask_for<bool>("relu", self, self)) return self;
    return on_host<at::_ops::relu_>::call(self);
}

inline at::Tensor& sum_out(const at::Tensor& self, at::OptionalIntArrayRef dims, bool keepdim, Maybe<at::ScalarType> type,
                           at::Tensor& out) {
    if (is_float(self) && is_float(out) && self.device() == out.device() && type.value_or(at::kFloat) == at::kFloat) {
        const std::vector<int64_t> over = dims ? dims->vec() : std::vector<int64_t>();
        if (ask_for<bool>("total", out, self, over)) return out;
    }
    return on_host<at::_ops::sum_IntList_out>::call(self, dims, keepdim, type, out);
}

inline at::Tensor& mm_out(const at::Tensor& self, const at::Tensor& other, at::Tensor& out) {
    const bool fits = is_float(self) && is_float(other) && is_float(out) && self.device() == out.device() &&
        other.device() == out.device() && self.dim() == 2 && other.dim() == 2 && self.size(1) == other.size(0) &&
        out.sizes() == Sizes({self.size(0), other.size(1)});
    if (fits && ask_for<bool>("mm", out, self, other)) return out;
    return on_host<at::_ops::mm_out>::call(self, other, out);
}

// Below this, every whole number is exact as a double.
constexpr double kExact = 9007199254740992;

// Never on the host: where the kernel does not serve, one number is copied to all places.
inline at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
    if (self.numel() == 0) return self;
    const bool is_exact = value.isFloatingPoint() || (!value.isComplex() && std::abs(value.toDouble()) < kExact);
    if (is_exact && ask_for<bool>("fill", self, value.toDouble())) return self;
    const at::Tensor number = at::scalar_tensor(value, at::TensorOptions().dtype(self.scalar_type()));
    copy_from(number.expand(self.sizes()), self, false);
    return self;
}

inline at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("resize_", resize);
    m.impl("set_", set_empty);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Tensor", at::native::set_tensor_);
    m.impl("is_set_to", at::native::is_set_to);
    m.impl("record_stream", record_stream);

    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("unfold", at::native::unfold);
    m.impl("view_as_real", at::native::view_as_real);
    m.impl("view_as_complex", at::native::view_as_complex);

    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_local_scalar_dense", item);

    m.impl("fill_.Scalar", fill);
    m.impl("zero_", zero);
    m.impl("add.out", add_out);
    m.impl("sub.out", sub_out);
    m.impl("mul.out", mul_out);
    m.impl("div.out", div_out);
    m.impl("relu", relu);
    m.impl("relu_", relu_in_place);
    m.impl("sum.IntList_out", sum_out);
    m.impl("mm.out", mm_out);

    // PyTorch makes these two of their out= variants, which warn of an out that they resize themselves.
    m.impl("mse_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());
    m.impl("smooth_l1_loss", torch::CppFunction::makeFromBoxedFunction<&fallback>());

    m.impl("convolution_overrideable", convolution);
    m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Copies see these bits themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
    m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
    m.impl("_copy_from", torch::CppFunction::makeFallthrough());
    m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

}  // namespace bfc_opencl

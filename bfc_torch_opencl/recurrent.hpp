// The cells of LSTM and GRU. PyTorch calls these on every back end except the CPU, which has none, so the fallback to
// the CPU finds nothing to call. Here they run on the host.
#pragma once

#include "operators.hpp"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/zeros_like.h>

namespace bfc_opencl {

inline at::Tensor with_bias(const at::Tensor& gates, const Maybe<at::Tensor>& bias) {
    return bias && bias->defined() ? gates.cpu() + bias->cpu() : gates.cpu();
}

inline at::Tensor sum_of_rows(const at::Tensor& gradient, bool wanted) {
    return wanted ? gradient.sum(at::IntArrayRef({0})) : at::Tensor();
}

// The derivatives of a sigmoid and of a tanh, from what they gave.
inline at::Tensor sigmoid_slope(const at::Tensor& value) { return value * (1 - value); }
inline at::Tensor tanh_slope(const at::Tensor& value) { return 1 - value * value; }

// The third result is kept for the gradients: the gates.
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& cell,
    const Maybe<at::Tensor>& input_bias, const Maybe<at::Tensor>& hidden_bias) {
    count_fallback("aten::_thnn_fused_lstm_cell");
    const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
    const auto in = gates[0].sigmoid(), forget = gates[1].sigmoid(), fresh = gates[2].tanh(), out = gates[3].sigmoid();
    const auto next = forget * cell.cpu() + in * fresh;
    const auto back = [&](const at::Tensor& tensor) { return tensor.to(cell.device()); };
    return {back(out * next.tanh()), back(next), back(at::cat({in, forget, fresh, out}, 1))};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(
    const Maybe<at::Tensor>& hidden_gradient, const Maybe<at::Tensor>& cell_gradient, const at::Tensor& cell,
    const at::Tensor& next, const at::Tensor& kept, bool has_bias) {
    count_fallback("aten::_thnn_fused_lstm_cell_backward_impl");
    const auto given = [&](const Maybe<at::Tensor>& gradient) {
        return gradient && gradient->defined() ? gradient->cpu() : at::zeros_like(next.cpu());
    };
    const auto gates = kept.cpu().chunk(4, 1);
    const auto &in = gates[0], &forget = gates[1], &fresh = gates[2], &out = gates[3];
    const auto of_hidden = given(hidden_gradient), level = next.cpu().tanh();
    const auto of_cell = of_hidden * out * tanh_slope(level) + given(cell_gradient);
    const auto of_gates = at::cat({of_cell * fresh * sigmoid_slope(in), of_cell * cell.cpu() * sigmoid_slope(forget),
                                   of_cell * in * tanh_slope(fresh), of_hidden * level * sigmoid_slope(out)}, 1);
    const auto back = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(cell.device()) : tensor; };
    return {back(of_gates), back(of_cell * forget), back(sum_of_rows(of_gates, has_bias))};
}

// The second result is kept for the gradients: the gates, and the states that they mix.
inline std::tuple<at::Tensor, at::Tensor> gru_cell(
    const at::Tensor& input_gates, const at::Tensor& hidden_gates, const at::Tensor& hidden,
    const Maybe<at::Tensor>& input_bias, const Maybe<at::Tensor>& hidden_bias) {
    count_fallback("aten::_thnn_fused_gru_cell");
    const auto of_input = with_bias(input_gates, input_bias).chunk(3, 1);
    const auto of_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
    const auto reset = (of_input[0] + of_hidden[0]).sigmoid(), update = (of_input[1] + of_hidden[1]).sigmoid();
    const auto fresh = (of_input[2] + reset * of_hidden[2]).tanh(), before = hidden.cpu();
    const auto back = [&](const at::Tensor& tensor) { return tensor.to(hidden.device()); };
    return {back(fresh + update * (before - fresh)), back(at::cat({reset, update, fresh, before, of_hidden[2]}, 1))};
}

inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(
    const at::Tensor& gradient, const at::Tensor& kept, bool has_bias) {
    count_fallback("aten::_thnn_fused_gru_cell_backward");
    const auto parts = kept.cpu().chunk(5, 1);
    const auto &reset = parts[0], &update = parts[1], &fresh = parts[2], &before = parts[3], &candidate = parts[4];
    const auto of_hidden = gradient.cpu();
    const auto of_fresh = of_hidden * (1 - update) * tanh_slope(fresh);
    const auto of_reset = of_fresh * candidate * sigmoid_slope(reset);
    const auto of_update = of_hidden * (before - fresh) * sigmoid_slope(update);
    const auto of_input_gates = at::cat({of_reset, of_update, of_fresh}, 1);
    const auto of_hidden_gates = at::cat({of_reset, of_update, of_fresh * reset}, 1);
    const auto back = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(gradient.device()) : tensor; };
    return {back(of_input_gates), back(of_hidden_gates), back(of_hidden * update),
            back(sum_of_rows(of_input_gates, has_bias)), back(sum_of_rows(of_hidden_gates, has_bias))};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("_thnn_fused_lstm_cell", lstm_cell);
    m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
    m.impl("_thnn_fused_gru_cell", gru_cell);
    m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

}  // namespace bfc_opencl

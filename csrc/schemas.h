// The schemas of the backend functions (docs/design.md), for every library that has them.
#pragma once

namespace fastattn::schemas {

constexpr char kAttention[] =
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, "
    "float scale, int window_left, int window_right, bool lower_right, int threshold) -> (Tensor, Tensor, "
    "Tensor)";
constexpr char kAttentionBackward[] =
    "attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out, "
    "Tensor stats, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, int window_left, int "
    "window_right, bool lower_right, int threshold, bool mask_grad) -> (Tensor, Tensor, Tensor, Tensor)";
constexpr char kVarlenAttention[] =
    "varlen_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? "
    "seqused_k, Tensor? seed, int max_q, int max_k, float scale, int window_left, int window_right, int "
    "threshold) -> (Tensor, Tensor, Tensor)";
constexpr char kVarlenAttentionBackward[] =
    "varlen_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor stats, Tensor cu_seq_q, Tensor cu_seq_k, Tensor? seqused_k, Tensor? seed, int max_q, "
    "int max_k, float scale, int window_left, int window_right, int threshold) -> (Tensor, Tensor, Tensor)";
constexpr char kSoftmaxDropout[] =
    "softmax_dropout(Tensor input, Tensor? attn_mask, Tensor? key_lengths, Tensor? seed, float scale, int "
    "window_left, int window_right, bool lower_right, int threshold) -> (Tensor out, Tensor stats)";
constexpr char kSoftmaxDropoutBackward[] =
    "softmax_dropout_backward(Tensor grad_out, Tensor input, Tensor stats, Tensor? attn_mask, Tensor? "
    "key_lengths, Tensor? seed, float scale, int window_left, int window_right, bool lower_right, int "
    "threshold, bool mask_grad) -> (Tensor grad_input, Tensor grad_mask)";
constexpr char kLayerNorm[] =
    "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> (Tensor out, Tensor mean, Tensor "
    "rstd)";
constexpr char kLayerNormBackward[] =
    "layer_norm_backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, "
    "ScalarType? weight_grad, ScalarType? bias_grad) -> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias)";
constexpr char kDropoutAddLayerNorm[] =
    "dropout_add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, Tensor? seed, int "
    "threshold, float eps) -> (Tensor out, Tensor sum, Tensor mean, Tensor rstd)";
constexpr char kDropoutAddLayerNormBackward[] =
    "dropout_add_layer_norm_backward(Tensor grad_out, Tensor? grad_sum, Tensor sum, Tensor mean, Tensor rstd, "
    "Tensor? weight, Tensor? seed, int threshold, ScalarType input_dtype, ScalarType? weight_grad, ScalarType? "
    "bias_grad) -> (Tensor grad_input, Tensor grad_sum_total, Tensor grad_weight, Tensor grad_bias)";
constexpr char kDropout[] = "dropout(Tensor input, Tensor seed, int threshold) -> Tensor";
constexpr char kDropoutMask[] = "dropout_mask(SymInt[] shape, Tensor seed, int threshold) -> Tensor";

}  // namespace fastattn::schemas

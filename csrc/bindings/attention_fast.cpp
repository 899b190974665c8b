// The fast path of scaled_dot_product_attention (fastattn/ops/register.py), which decoding needs.
#include <float.h>
#include <math.h>

#include "attention.h"

namespace fastattn {
namespace {

// A dense CPU tensor (batch, heads, rows, columns) of a dtype that the kernels take.
bool is_plain(const Tensor& tensor, Dtype* dtype) {
  if (!tensor.defined()) return false;
  int32_t device, layout;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_layout(tensor.get(), &layout));
  return device == aoti_torch_device_type_cpu() && layout == aoti_torch_layout_strided() && is_dtype(tensor, dtype) &&
         *dtype != Dtype::boolean && tensor.dim() == 4 && has_dense_columns(tensor);
}

// A whole public call without checks in Python, gradient and statistics. Undefined, None in Python, where it is not a
// plain one: the public function then takes the usual path, which words the errors.
Tensor attention_fast(const Tensor& query, const Tensor& key, const Tensor& value,
                      const std::optional<Tensor>& attn_mask, double dropout_p, bool is_causal,
                      std::optional<double> scale, bool enable_gqa) {
  constexpr int64_t kMaxHeadDim = 256;
  Dtype dtype, key_dtype, value_dtype;
  if (attn_mask || dropout_p != 0 || enable_gqa || !is_plain(query, &dtype) || !is_plain(key, &key_dtype) ||
      !is_plain(value, &value_dtype) || key_dtype != dtype || value_dtype != dtype)
    return Tensor();
  const Sizes q = query.sizes(), k = key.sizes(), v = value.sizes();
  if (k[0] != q[0] || v[0] != q[0] || k[1] != q[1] || v[1] != q[1] || v[2] != k[2] || k[3] != q[3]) return Tensor();
  if (q[3] < 1 || q[3] > kMaxHeadDim || v[3] < 1 || v[3] > kMaxHeadDim) return Tensor();
  double factor = scale.value_or(1 / sqrt((double)q[3]));
  if (!(fabs(factor) <= FLT_MAX)) return Tensor();
  if (fabs(factor) < FLT_MIN) factor = 0;

  const Backend backend(query);
  Attention a = {};
  set_operands(a, query, key, value, std::nullopt, factor, q[2], is_causal ? 0 : k[2], false, 0);
  const Tensor out = empty_heads(query, a.seqlen_q, a.value_head_dim, backend.device);
  a.out = heads_of(out);
  backend.run(a);
  return out;
}

FASTATTN_OPERATION(attention_fast)

}  // namespace
}  // namespace fastattn

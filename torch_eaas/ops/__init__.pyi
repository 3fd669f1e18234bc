from torch_eaas.ops.shrinking import group_shrink as group_shrink

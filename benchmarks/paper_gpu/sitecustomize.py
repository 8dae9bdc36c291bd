"""Switches cuDNN off as soon as torch has been imported: on paper it would give no answers. Python imports this by itself."""

import sys


class _AfterTorchsBackends:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.optim" and "torch.backends.cudnn" in sys.modules:
            sys.meta_path.remove(self)
            sys.modules["torch"]._C._set_cudnn_enabled(False)


sys.meta_path.insert(0, _AfterTorchsBackends())

"""SGLang's modules import `sgl_kernel`: without a GPU our stand-in must be there first."""

from hypothesis import settings

from sglang_ext.cpu.install import install

install()
# The first example pays for compilation; the machine may be busy.
settings.register_profile("default", deadline=None)
settings.load_profile("default")

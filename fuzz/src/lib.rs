//! What fuzz targets share: the form of their inputs.

#![forbid(unsafe_code)]

/// Cuts bytes into the frames of a message: each has two bytes of length, little-endian, before it.
/// The last is as long as what is left.
pub fn frames(mut bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    while let Some((length, rest)) = bytes.split_first_chunk::<2>() {
        let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
        let (frame, rest) = rest.split_at(length);
        frames.push(frame.to_vec());
        bytes = rest;
    }
    frames
}

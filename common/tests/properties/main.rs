//! What holds for every input. A failing case is shrunk and printed.

mod plans;
mod rooms;
mod wire;

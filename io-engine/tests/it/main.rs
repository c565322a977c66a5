//! Every transport moves exactly the bytes it is told to, checks where they land, and says what
//! happened when it cannot.

mod exactness;
mod foreign;
mod lifetimes;
mod peers;
mod refusals;
mod support;

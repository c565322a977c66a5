#[cfg(test)]
mod nothing {}

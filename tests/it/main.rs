mod bootstrap_bad_input;
mod bootstrap_http;
mod bootstrap_server;
mod demo;
mod durability;

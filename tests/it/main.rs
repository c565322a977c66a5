mod bootstrap_http;
mod demo;

// Asks a router, prints the text as it comes and writes the speech to answer.wav. Ctrl-C cancels.
//
//     omnistage protos protos --errors && make
//     build/ask HOST:PORT QUESTION [SEED [MODEL]]
#include <chrono>
#include <csignal>
#include <cstdint>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>

#include <grpcpp/grpcpp.h>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "omnistage/v1/omni.grpc.pb.h"

namespace v1 = omnistage::v1;

// What went wrong: the reason, and when to ask again, are in a google.rpc.Status in the trailing metadata.
std::string explain(const grpc::Status& failure) {
  std::string reason = "gRPC status " + std::to_string(failure.error_code());
  std::ostringstream more;
  google::rpc::Status status;
  status.ParseFromString(failure.error_details());
  for (const google::protobuf::Any& any : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    google::rpc::RetryInfo retry;
    if (any.UnpackTo(&info)) reason = info.reason();
    if (any.UnpackTo(&bad))
      for (const auto& violation : bad.field_violations()) more << "; field " << violation.field();
    if (any.UnpackTo(&retry)) more << "; ask again in " << retry.retry_delay().seconds() + retry.retry_delay().nanos() / 1e9 << " s";
  }
  return "error: " + reason + ": " + failure.error_message() + more.str();
}

// A number of so many bytes, little endian.
std::string number(uint32_t value, int bytes) {
  std::string text;
  for (; bytes > 0; --bytes, value >>= 8) text += static_cast<char>(value & 255);
  return text;
}

// A file of signed 16-bit samples, in which sound comes unless another encoding is asked for.
std::string wav(const std::string& samples, uint32_t rate, uint32_t channels) {
  return "RIFF" + number(36 + samples.size(), 4) + "WAVEfmt " + number(16, 4) + number(1, 2) + number(channels, 2) + number(rate, 4) +
         number(2 * channels * rate, 4) + number(2 * channels, 2) + number(16, 2) + "data" + number(samples.size(), 4) + samples;
}

int main(int count, char** words) {
  if (count < 3) {
    std::cerr << "usage: ask HOST:PORT QUESTION [SEED [MODEL]]\n";
    return 2;
  }
  // A handler of a signal may not call gRPC: a thread waits for Ctrl-C instead, and no other thread gets it.
  sigset_t interrupt;
  sigemptyset(&interrupt);
  sigaddset(&interrupt, SIGINT);
  pthread_sigmask(SIG_BLOCK, &interrupt, nullptr);

  auto stub = v1::OmniService::NewStub(grpc::CreateChannel(words[1], grpc::InsecureChannelCredentials()));
  v1::GenerateRequest request;
  v1::Message& message = *request.mutable_thinker()->add_messages();
  message.set_role("user");
  message.add_parts()->set_text(words[2]);
  if (count > 3) request.set_seed(std::stoull(words[3]));
  if (count > 4) request.set_model(words[4]);

  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::minutes(2));
  std::thread([&] { int number; sigwait(&interrupt, &number); context.TryCancel(); }).detach();
  auto call = stub->Generate(&context, request);
  std::string samples;
  v1::AudioChunk form;
  for (v1::GenerateResponse event; call->Read(&event);) {
    if (event.chunk().has_text()) std::cout << event.chunk().text().text() << std::flush;
    if (!event.chunk().has_audio()) continue;
    if (samples.empty()) form = event.chunk().audio();
    samples += event.chunk().audio().data();
  }
  std::cout << std::endl;
  const grpc::Status status = call->Finish();
  if (!status.ok()) {
    std::cerr << explain(status) << "\n";
    return 1;
  }
  if (!samples.empty()) std::ofstream("answer.wav", std::ios::binary) << wav(samples, form.sample_rate_hz(), form.channel_count());
}

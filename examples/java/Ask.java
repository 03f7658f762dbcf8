// Asks a router, prints the text as it comes and writes the speech to answer.wav. Ctrl-C cancels.
//
//     omnistage protos protos --errors && make
//     build/ask HOST:PORT QUESTION [SEED [MODEL]]
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.concurrent.TimeUnit;
import omnistage.v1.ChunkOuterClass.AudioChunk;
import omnistage.v1.ChunkOuterClass.Chunk;
import omnistage.v1.Omni.GenerateRequest;
import omnistage.v1.Omni.GenerateResponse;
import omnistage.v1.OmniServiceGrpc;
import omnistage.v1.Stage.Message;
import omnistage.v1.Stage.Part;

public final class Ask {
  /** What went wrong: the reason, and when to ask again, are in a google.rpc.Status in the trailing metadata. */
  static String explain(StatusRuntimeException failure) throws InvalidProtocolBufferException {
    String reason = failure.getStatus().getCode().name();
    String more = "";
    for (Any any : StatusProto.fromThrowable(failure).getDetailsList()) {
      if (any.is(ErrorInfo.class)) reason = any.unpack(ErrorInfo.class).getReason();
      if (any.is(BadRequest.class))
        for (var violation : any.unpack(BadRequest.class).getFieldViolationsList()) more += "; field " + violation.getField();
      if (any.is(RetryInfo.class)) {
        var delay = any.unpack(RetryInfo.class).getRetryDelay();
        more += "; ask again in " + (delay.getSeconds() + delay.getNanos() / 1e9) + " s";
      }
    }
    return "error: " + reason + ": " + failure.getStatus().getDescription() + more;
  }

  /** A file of signed 16-bit samples, in which sound comes unless another encoding is asked for. */
  static byte[] wav(byte[] samples, AudioChunk form) {
    int rate = form.getSampleRateHz();
    int channels = form.getChannelCount();
    ByteBuffer file = ByteBuffer.allocate(44 + samples.length).order(ByteOrder.LITTLE_ENDIAN);
    file.put("RIFF".getBytes()).putInt(36 + samples.length).put("WAVEfmt ".getBytes()).putInt(16).putShort((short) 1);
    file.putShort((short) channels).putInt(rate).putInt(2 * channels * rate).putShort((short) (2 * channels)).putShort((short) 16);
    return file.put("data".getBytes()).putInt(samples.length).put(samples).array();
  }

  static void ask(ManagedChannel channel, GenerateRequest request) throws IOException {
    var stub = OmniServiceGrpc.newBlockingStub(channel).withDeadlineAfter(2, TimeUnit.MINUTES);
    var samples = new ByteArrayOutputStream();
    AudioChunk form = null;
    for (Iterator<GenerateResponse> call = stub.generate(request); call.hasNext(); ) {
      Chunk chunk = call.next().getChunk();
      System.out.print(chunk.getText().getText());
      System.out.flush();
      if (!chunk.hasAudio()) continue;
      if (form == null) form = chunk.getAudio();
      chunk.getAudio().getData().writeTo(samples);
    }
    System.out.println();
    if (form != null) Files.write(Path.of("answer.wav"), wav(samples.toByteArray(), form));
  }

  public static void main(String[] words) throws IOException {
    if (words.length < 2) throw new IllegalArgumentException("usage: ask HOST:PORT QUESTION [SEED [MODEL]]");
    var request = GenerateRequest.newBuilder();
    request.getThinkerBuilder().addMessages(Message.newBuilder().setRole("user").addParts(Part.newBuilder().setText(words[1])));
    if (words.length > 2) request.setSeed(Long.parseUnsignedLong(words[2]));
    if (words.length > 3) request.setModel(words[3]);

    ManagedChannel channel = ManagedChannelBuilder.forTarget(words[0]).usePlaintext().build();
    Context.CancellableContext context = Context.current().withCancellation();
    Thread asking = Thread.currentThread();
    // Ctrl-C: cancel, and let the answer end before the process does.
    Runtime.getRuntime().addShutdownHook(new Thread(() -> {
      context.cancel(null);
      try {
        asking.join();
      } catch (InterruptedException ended) {
        Thread.currentThread().interrupt();
      }
    }));
    int exitCode = 0;
    try {
      Context before = context.attach();
      ask(channel, request.build());
      context.detach(before);
    } catch (StatusRuntimeException failure) {
      System.err.println("\n" + explain(failure));
      exitCode = 1;
    }
    channel.shutdownNow();
    if (exitCode != 0) Runtime.getRuntime().halt(exitCode);
  }
}

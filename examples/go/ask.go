// Asks a router, prints the text as it comes and writes the speech to answer.wav. Ctrl-C cancels.
//
//	omnistage protos protos && make
//	build/ask HOST:PORT QUESTION [SEED [MODEL]]
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"time"

	v1 "ask/omnistage/v1"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// explain says what went wrong: the reason, and when to ask again, are in the details of the status.
func explain(err error) string {
	failure := status.Convert(err)
	reason, more := failure.Code().String(), ""
	for _, detail := range failure.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			reason = detail.Reason
		case *errdetails.BadRequest:
			for _, violation := range detail.FieldViolations {
				more += "; field " + violation.Field
			}
		case *errdetails.RetryInfo:
			delay := time.Duration(detail.RetryDelay.Seconds)*time.Second + time.Duration(detail.RetryDelay.Nanos)
			more += fmt.Sprintf("; ask again in %v s", delay.Seconds())
		}
	}
	return fmt.Sprintf("error: %s: %s%s", reason, failure.Message(), more)
}

// wav makes a file of signed 16-bit samples, in which sound comes unless another encoding is asked for.
func wav(samples []byte, form *v1.AudioChunk) []byte {
	var file bytes.Buffer
	size, rate, channels := uint32(len(samples)), form.SampleRateHz, form.ChannelCount
	for _, part := range []interface{}{
		[]byte("RIFF"), 36 + size, []byte("WAVEfmt "), uint32(16), uint16(1), uint16(channels), rate,
		2 * channels * rate, uint16(2 * channels), uint16(16), []byte("data"), size, samples,
	} {
		binary.Write(&file, binary.LittleEndian, part)
	}
	return file.Bytes()
}

func ask(ctx context.Context, address string, request *v1.GenerateRequest) error {
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	call, err := v1.NewOmniServiceClient(connection).Generate(ctx, request)
	if err != nil {
		return err
	}
	var samples []byte
	var form *v1.AudioChunk
	for {
		event, err := call.Recv()
		if err == io.EOF {
			break
		} else if err != nil {
			return err
		}
		fmt.Print(event.GetChunk().GetText().GetText())
		if audio := event.GetChunk().GetAudio(); audio != nil {
			samples = append(samples, audio.Data...)
			if form == nil {
				form = audio
			}
		}
	}
	if form == nil {
		return nil
	}
	return os.WriteFile("answer.wav", wav(samples, form), 0o644)
}

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: ask HOST:PORT QUESTION [SEED [MODEL]]")
		os.Exit(2)
	}
	part := &v1.Part{Content: &v1.Part_Text{Text: os.Args[2]}}
	messages := []*v1.Message{{Role: "user", Parts: []*v1.Part{part}}}
	request := &v1.GenerateRequest{Thinker: &v1.ThinkerParams{Messages: messages}}
	if len(os.Args) > 3 {
		seed, err := strconv.ParseUint(os.Args[3], 10, 64)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(2)
		}
		request.Seed = &seed
	}
	if len(os.Args) > 4 {
		request.Model = os.Args[4]
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	err := ask(ctx, os.Args[1], request)
	fmt.Println()
	if err != nil {
		fmt.Fprintln(os.Stderr, explain(err))
		os.Exit(1)
	}
}
